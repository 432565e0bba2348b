import dataclasses
import hashlib
import json
import re
import sys
from base64 import b64encode
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from halfstep.core import Diagnosis, Exponents, Finding, Range, Ranges, Report, Step
from halfstep.errors import MissingExtraError
from halfstep.report import check_page, page
from halfstep.report._numbers import UNKNOWN
from halfstep.report._page import embedded
from tests.report.reports import HOSTILE, REPORT, hostile

FOLDER = Path(sys.modules["halfstep.report"].__file__).parent / "page"
PAGES = {"faulty": REPORT, "hostile": hostile(), "empty": Report(script="a.py", policy="float32")}
READABLE = 4.5  # the ratio of luminances that WCAG asks of text
GROUNDS = ("--back", "--card")
TEXTS = ("--ink", "--quiet", "--link", "--error", "--warning", "--note", "--fine")


class Outline(HTMLParser):
    """Notes the elements, the headings and the texts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts, self.open, self.captions = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def named(self, *tags):
        return [(tag, attributes) for tag, attributes in self.tags if tag in tags]


@pytest.fixture(scope="module", params=PAGES)
def outline(request):
    return Outline(page(PAGES[request.param]))


def test_nothing_is_loaded_from_elsewhere(outline):
    asked = [
        value
        for _, attributes in outline.tags
        for name, value in attributes.items()
        if name in ("src", "href", "action", "data", "srcset", "poster")
    ]
    assert [each for each in asked if not each.startswith(("#", "data:,"))] == []


def test_only_scripts_of_known_text_may_run(outline):
    _, first, second = outline.scripts
    (policy,) = [it["content"] for _, it in outline.named("meta") if "http-equiv" in it]
    allowed = re.findall(r"'sha256-([^']*)'", policy)
    digests = [
        b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (first, second)
    ]
    assert allowed == digests
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert not re.search(r"script-src[^;]*unsafe", policy)


def test_headings_descend_one_by_one_and_every_table_has_a_caption(outline):
    levels = [int(tag[1]) for tag, _ in outline.named("h1", "h2", "h3", "h4")]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert len(outline.named("caption")) == len(outline.named("table"))
    assert all(it.get("scope") in ("row", "col") for _, it in outline.named("th"))


def test_no_name_becomes_an_element_or_an_attribute():
    outline = Outline(page(hostile()))
    assert outline.named("img", "b") == []
    assert len(outline.named("script")) == 3
    assert not [it for _, it in outline.tags if any(name.startswith("on") for name in it)]
    assert not [it for _, it in outline.named("a") if not it["href"].startswith("#")]


def test_the_embedded_data_is_what_was_given():
    data = {name: list(HOSTILE) for name in HOSTILE}
    text = embedded(data)
    assert json.loads(text) == data
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_what_no_file_can_hold_is_written_as_its_code():
    text = page(hostile())
    text.encode()
    assert r"half\ud800" in text
    assert not re.search("[\x00\x1b\u202e\u2028]", text.split("<script", 1)[0])


def test_an_empty_report_has_no_empty_section():
    outline = Outline(page(PAGES["empty"]))
    assert [it["id"] for _, it in outline.named("section")] == ["findings"]


def test_all_parts_of_a_full_report_are_there():
    text, outline = page(REPORT), Outline(page(REPORT))
    sections = ["findings", "steps", "ranges", "casts", "modules"]
    assert [it["id"] for _, it in outline.named("section")] == sections
    assert REPORT.findings[1].text in text
    assert "train.py:41 (forward)" in text
    assert "1 error, 1 warning, 1 note" in text


def test_a_fault_is_told_once_with_what_finds_it():
    text = page(REPORT)
    assert text.count("with_rule(") == 2  # its part, and all in one
    assert text.count('id="fault"') == text.count('id="write"') == 1
    assert text.count('class="copy"') == 3
    assert text.index('id="fault"') < text.index("train.py:41 (forward)") < text.index("31 % of")
    alone = page(dataclasses.replace(REPORT, findings=()))
    assert alone.count("with_rule(") == alone.count('id="fault"') == 1
    assert 'id="write"' not in alone
    assert "blocks.3.mlp.expand: matmul made inf" in alone
    assert "Nothing that needs mending" not in alone


def test_findings_of_the_same_remedy_tell_it_once():
    alike = [Finding("warning", "Its updates are lost.", name, "masters") for name in "abc"]
    text = page(Report(script="a.py", policy="b", findings=tuple(alike)))
    assert text.count("<code>masters</code>") == 1
    assert text.count("Write the same as above.") == 2


def test_what_was_not_finite_is_not_called_zero():
    zeros, broken = Exponents(zeros=8), Exponents(nans=5, infs=3)
    report = Report(
        script="a.py",
        policy="b",
        ranges=Ranges((Range("head", "grad_output", zeros, broken, "float16"),)),
    )
    cells = re.findall(r"<td class=\"n[^>]*>([^<]*)", page(report))
    assert cells[:5] == ["8", "NaN", UNKNOWN, "3", "5"]
    assert set(cells[5:]) == {UNKNOWN}


def test_that_it_was_stopped_is_said():
    report = Report(script="a.py", policy="b", steps=(Step(1),))
    assert "Stopped before its end" not in page(report)
    assert "Stopped before its end" in page(dataclasses.replace(report, stopped=True))


def test_an_underflow_is_told_in_its_own_words():
    fault = dataclasses.replace(REPORT.diagnosis.first, kind="underflow", role="grad_input")
    text = page(dataclasses.replace(REPORT, diagnosis=Diagnosis((fault,)), findings=()))
    assert "which begins at 6e-08" in text
    assert "most of the gradient of its input became zero in matmul" in text
    assert "made underflow" not in text


def test_very_many_skipped_steps_do_not_fill_the_page():
    steps = tuple(Step(number, skipped=True, reason="why") for number in range(1, 2001))
    text = page(Report(script="a.py", policy="float32", steps=steps))
    assert "the first 500 of 2000" in text
    assert "Skipped steps (2000)" in text
    assert text.count("<td>why</td>") == 500


def test_it_says_that_the_script_failed_and_not_that_all_is_well():
    text = page(Report(script="a.py", policy="float32", error="Traceback\nValueError: <oh>"))
    assert "ValueError: &lt;oh&gt;" in text
    assert "Nothing that needs mending" not in text
    assert "Nothing that needs mending" in page(PAGES["empty"])


@pytest.mark.parametrize("name", ["jinja2", "plotly"])
def test_a_missing_extra_is_named_with_the_line_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(
        "halfstep.report._page.find_spec", lambda asked: None if asked == name else object()
    )
    with pytest.raises(MissingExtraError, match=rf"without {name}.*'halfstep\[report\]'"):
        check_page()


def luminance(colour):
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
    return sum(weight * it for weight, it in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def schemes():
    style = (FOLDER / "page.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    return [dict(re.findall(r"(--[\w-]+): (#\w{6})", block)) for block in blocks]


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_every_text_can_be_read_on_every_ground(scheme):
    for text in TEXTS:
        for ground in GROUNDS:
            assert contrast(scheme[text], scheme[ground]) >= READABLE, (text, ground)
    assert contrast(scheme["--ink"], scheme["--code"]) >= READABLE


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_the_parts_of_the_page_are_in_the_wheel(tmp_path):
    builders = pytest.importorskip("hatchling.builders.wheel")
    builder = builders.WheelBuilder(str(FOLDER.parents[3]))
    wheel = next(builder.build(directory=str(tmp_path), versions=["standard"]))
    import zipfile

    names = zipfile.ZipFile(wheel).namelist()
    parts = {f"halfstep/report/page/{each.name}" for each in FOLDER.iterdir()}
    assert len(parts) == 5
    assert parts <= set(names)
