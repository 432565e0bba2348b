"""The page in a real browser, from a file, without network."""

import pytest

from halfstep.core import Report
from halfstep.report import page
from tests.report.reports import HOSTILE, MODULES, REPORT, ROLES, hostile

pytestmark = pytest.mark.browser
PAGES = {"faulty": REPORT, "hostile": hostile(), "empty": Report(script="a.py", policy="float32")}
DRAWN = "return document.querySelectorAll('#timeline .main-svg, #heat .main-svg').length >= 2"
SHOWN = (
    "return [...document.querySelectorAll('#modules-table tbody tr')].filter(row => !row.hidden)"
)
CELLS = SHOWN + ".map(row => row.cells[arguments[0]].textContent)"
HEAT = "return document.getElementById('heat')"


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, report in PAGES.items():
        (folder / f"{name}.html").write_text(page(report), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.fixture
def faulty(browser, paths):
    browser.open(paths["faulty"])
    browser.wait_for(DRAWN)
    return browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_it_asks_for_nothing_but_itself_and_complains_of_nothing(browser, paths, name, dark):
    browser.open(paths[name], dark=dark)
    if name != "empty":
        browser.wait_for(DRAWN)
    assert browser.requested() == [paths[name].as_uri()]
    assert browser.complaints() == []


def test_a_request_and_a_complaint_would_be_noticed(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>throw Error('oh')</script>")
    browser.open(path)
    assert browser.requested() == [path.as_uri(), "http://127.0.0.1:9/x.png"]
    assert any("oh" in text for text in browser.complaints())


def test_no_other_script_runs_and_no_other_address_is_asked_even_where_a_name_escaped(
    browser, paths, tmp_path
):
    path, added = tmp_path / "injected.html", "<script>window.hacked = true</script>"
    added += "<img id='injected' src='http://127.0.0.1:9/x.png' onerror='window.hacked = true'>"
    path.write_text(paths["faulty"].read_text().replace("</main>", f"{added}</main>"))
    browser.open(path)
    browser.wait_for(DRAWN)
    assert browser.find("#injected")
    assert browser.run("return window.hacked") is None
    assert sum("Content Security Policy" in text for text in browser.complaints()) >= 2


def test_hostile_names_are_shown_as_text(browser, paths):
    browser.open(paths["hostile"])
    browser.wait_for(DRAWN)
    assert browser.run("return window.hacked") is None
    for made in ("main img", "main b", "main a", "main script", "#heat text a", "#heat text b"):
        assert browser.run("return document.querySelectorAll(arguments[0]).length", made) == 0
    plain = [name for name in HOSTILE if name.isprintable() and name]
    assert set(plain) <= set(browser.run(CELLS, 0))
    labels = browser.run(
        "return [...document.querySelectorAll('#heat .ytick')].map(it => it.textContent)"
    )
    assert {"<b>bold</b>", "<!--", "&lt;entity&gt;&amp;", r"\u202ereversed\x1b[31m\x00"} <= set(
        labels
    )
    assert browser.run("return document.title").startswith("<script>window.hacked")


def test_hostile_names_are_text_in_what_shows_on_hovering(browser, paths):
    browser.open(paths["hostile"])
    browser.wait_for(DRAWN)
    last = len(HOSTILE) - 1
    for index, name in ((0, "<b>bold</b>"), (6, "<a href=")):
        browser.run(f"Plotly.Fx.hover('heat', {{xval: -3, yval: {last - index}}}, 'xy')")
        browser.wait_for(
            "const it = document.querySelector('#heat .hovertext');"
            f"return it && it.textContent.includes({name!r})"
        )
    assert browser.run("return document.querySelectorAll('#heat .hovertext a').length") == 0


def test_searching(faulty):
    search = faulty.find("#search")
    search.send_keys("BLOCKS.1 grad_weight")
    assert set(faulty.run(CELLS, 0)) == {"blocks.1.attention", "blocks.1.mlp.expand"}
    assert set(faulty.run(CELLS, 1)) == {"grad_weight"}
    assert faulty.find("#search-count").text == f"2 of {len(REPORT.ranges.rows)}"
    search.send_keys(" nowhere")
    assert faulty.run(SHOWN) == []
    search.clear()
    search.send_keys("head")
    assert len(faulty.run(SHOWN)) == len(ROLES)


def column(browser, name):
    heads = browser.run(
        "return [...document.querySelectorAll('#modules-table thead th')].map(it => it.textContent)"
    )
    return heads.index(name)


def sort(browser, name):
    index = column(browser, name)
    browser.run(f"document.querySelectorAll('#modules-table .sort')[{index}].click()")
    head = f"document.querySelectorAll('#modules-table thead th')[{index}]"
    return browser.run(f"return {head}.getAttribute('aria-sort')"), browser.run(CELLS, index)


def test_sorting(faulty):
    assert sort(faulty, "Inf") == ("descending", ["7", *["0"] * 43])
    assert sort(faulty, "Inf")[1][-1] == "7"
    assert faulty.run("return document.querySelectorAll('#modules-table [aria-sort]').length") == 1
    order, names = sort(faulty, "Module")
    assert order == "ascending"
    assert names == sorted(names)
    assert names[0] == "blocks.0.attention"
    _, sizes = sort(faulty, "Largest")
    assert list(map(float, sizes)) == sorted(map(float, sizes), reverse=True)


def choose(browser, control, value):
    browser.run(
        "const it = document.getElementById(arguments[0]);"
        "it.value = [...it.options].find(each => each.textContent === arguments[1]).value;"
        "it.dispatchEvent(new Event('change'))",
        control,
        value,
    )


def test_the_tensor_the_format_and_the_scale_can_be_chosen(faulty):
    lines = HEAT + ".data.filter(it => it.line && it.name !== 'around').map(it => it.x[0])"
    choose(faulty, "role", "grad_output")
    assert faulty.run(HEAT + ".data[0].z.length") == len(MODULES)
    # The edges of float16 at the loss scale 2**16; a cell reaches half an exponent to either side.
    assert faulty.run(lines) == pytest.approx([-41.5, -30.5, -0.5], abs=1e-3)
    first = faulty.run(HEAT + ".data[0].x")
    choose(faulty, "scale", "2^0")
    assert faulty.run(lines) == pytest.approx([-25.5, -14.5, 15.5], abs=1e-3)
    assert "become 0" in faulty.find("#heat-note").text
    assert (
        "Of the numbers of these tensors that are not 0, 0 % become 0"
        not in faulty.find("#heat-note").text
    )
    choose(faulty, "format", "float8_e5m2")
    assert faulty.run(lines)[0] == pytest.approx(-17.5, abs=1e-3)
    choose(faulty, "role", "weight")
    assert faulty.run(HEAT + ".data[0].x") != first
    assert faulty.run("return document.getElementById('scale').disabled") is True
    groups = faulty.run(
        "return [...document.querySelectorAll('#role optgroup')].map(it => it.label)"
    )
    assert groups == ["Forward pass", "Backward pass"]


def drag(browser, plot):
    """Drags over the middle half of a plot."""
    from selenium.webdriver import ActionChains

    layer = browser.find(f"#{plot} .nsewdrag")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", layer)
    width = layer.size["width"]
    actions = ActionChains(browser.driver).move_to_element_with_offset(layer, -width // 4, -20)
    actions.click_and_hold().move_by_offset(width // 2, 40).release().perform()


@pytest.mark.parametrize("plot", ["timeline", "heat"])
def test_zooming(faulty, plot):
    span = f"return document.getElementById('{plot}')._fullLayout.xaxis.range"
    low, high = faulty.run(span)
    drag(faulty, plot)
    near = f"const [low, high] = document.getElementById('{plot}')._fullLayout.xaxis.range;"
    faulty.wait_for(f"{near} return high - low < {0.6 * (high - low)}")
    inner_low, inner_high = faulty.run(span)
    assert low < inner_low < inner_high < high
    faulty.run(
        f"return Plotly.relayout('{plot}', {{'xaxis.range': [{low}, {high}]}}).then(() => 1)"
    )
    assert faulty.run(span) == [low, high]


def test_a_remedy_is_copied_as_it_is(faulty):
    faulty.run(
        "navigator.clipboard.writeText = (text) =>"
        " { window.copied = text; return Promise.resolve() }"
    )
    faulty.find("#fault .copy").click()
    faulty.wait_for("return document.querySelector('#fault .copy').textContent === 'Copied'")
    assert faulty.run("return window.copied") == REPORT.diagnosis.first.remedy


def test_a_remedy_is_selected_where_nothing_may_be_copied(faulty):
    faulty.run("navigator.clipboard.writeText = () => Promise.reject(Error('denied'))")
    faulty.find("#fault .copy").click()
    faulty.wait_for("return document.querySelector('#fault .copy').textContent === 'Copied'")
    assert faulty.run("return getSelection().toString()") == REPORT.diagnosis.first.remedy


def test_the_plots_follow_the_appearance_of_the_system(faulty):
    ink = "return document.getElementById('heat')._fullLayout.font.color"
    light = faulty.run(ink)
    faulty.emulate(dark=True)
    faulty.wait_for(f"{ink} !== {light!r}")


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [360, 768])
def test_nothing_sticks_out_of_a_narrow_window(browser, paths, name, width):
    browser.open(paths[name], width=width, height=700)
    assert browser.run("return document.documentElement.scrollWidth") <= width
