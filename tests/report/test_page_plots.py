"""What the plots show, in a real browser, of reports that have little to show."""

import dataclasses
import math

import pytest

from halfstep.core import Diagnosis, Exponents, Range, Ranges, Report, Step
from halfstep.report import page
from tests.report.reports import FAULT

pytestmark = pytest.mark.browser
HEAT = "return document.getElementById('heat')"


def opened(browser, folder, **values):
    """Opens the page of a report that has only these values."""
    path = folder / "opened.html"
    path.write_text(page(Report(script="a.py", policy="b", **values)), encoding="utf-8")
    browser.open(path)
    return browser


def test_a_heat_map_of_very_many_modules_names_as_many_as_there_is_room_for(browser, tmp_path):
    one = Exponents({0: 4, 3: 1}, largest=9.0)
    rows = tuple(Range(f"layers.{index}", "output", one, one) for index in range(400))
    opened(browser, tmp_path, ranges=Ranges(rows))
    labels = browser.wait_for(
        "const found = [...document.querySelectorAll('#heat .ytick text')];"
        "return found.length && found.map(it => it.textContent)"
    )
    assert len(labels) == 100
    assert "layers.0" in labels
    assert browser.run(HEAT + ".data[0].z.length") == 400


def test_losses_that_are_all_nan_are_marked(browser, tmp_path):
    opened(browser, tmp_path, steps=tuple(Step(number, math.nan, 8.0) for number in (1, 2, 3)))
    browser.wait_for("return document.querySelector('#timeline .main-svg')")
    plot = "return document.getElementById('timeline')"
    marks = "const found = [...document.querySelectorAll('#timeline .points path')];"
    assert browser.run(f"{plot}.data[1].x") == [1, 2, 3]
    assert browser.run(
        f"{marks} return found.filter(it => it.getBoundingClientRect().width).length"
    )
    assert "no loss was finite" in browser.find("#timeline").text


def test_steps_without_a_loss_are_not_an_empty_plot(browser, tmp_path):
    opened(browser, tmp_path, steps=(Step(1), Step(2)))
    browser.wait_for("return document.querySelector('#timeline .main-svg')")
    assert "no loss was seen" in browser.find("#timeline").text


LOST = Range("head", "grad_output", Exponents(zeros=4), Exponents(nans=4), "float16")
ONE = Exponents({0: 3}, largest=1.0)


def test_it_opens_on_the_output_where_no_gradient_is_finite(browser, tmp_path):
    made = Range("head", "output", ONE, Exponents({0: 2}, infs=1, largest=1.0), "float16")
    opened(browser, tmp_path, ranges=Ranges((LOST, made)))
    shown = "const it = document.getElementById('role'); return it.selectedOptions[0].textContent"
    assert browser.wait_for(shown) == "output"
    assert browser.run("return document.getElementById('role').options[1].textContent") == (
        "grad_output (nothing finite)"
    )
    assert browser.run(HEAT + ".data.at(-1).text[0][0]") == "head<br>inf: 1 of 3 numbers, as it ran"


def test_a_cast_opens_on_the_format_that_could_not_hold_it(browser, tmp_path):
    wide = Range(FAULT.module, "input", *[Exponents({16: 1}, largest=1e5)] * 2, "float32")
    fault = dataclasses.replace(FAULT, operation="cast", role="input")
    opened(browser, tmp_path, ranges=Ranges((wide,)), diagnosis=Diagnosis((fault,)))
    assert browser.wait_for("return document.getElementById('format').value") == "float16"
    assert browser.find("#heat-note").text.endswith("0 % become 0 and 100 % become inf.")


def test_a_long_path_keeps_the_ends_of_each_part(browser, tmp_path):
    name = "encoder_stack_of_all_layers.11.feed_forward_output_projection"
    opened(browser, tmp_path, ranges=Ranges((Range(name, "output", ONE, ONE),)))
    label = browser.wait_for(
        "const it = document.querySelector('#heat .ytick text'); return it && it.textContent"
    )
    first, layer, last = label.split(".")
    assert (first[:8], layer, last[-9:]) == ("encoder_", "11", "rojection")


def test_a_map_of_nothing_but_nan_shows_them(browser, tmp_path):
    opened(browser, tmp_path, ranges=Ranges((LOST,)))
    browser.wait_for("return document.querySelector('#heat .main-svg')")
    assert browser.run(HEAT + ".data.at(-1).z") == [[None, 0]]
    assert browser.find("#heat-note").text.startswith("None of the numbers")
    assert browser.complaints() == []
