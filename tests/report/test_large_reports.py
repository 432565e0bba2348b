"""What is told of a model of ten thousand modules can be opened, and read in a terminal."""

import io

import pytest
from rich.console import Console

from halfstep.core import Cast, Diagnosis, Exponents, Fault, Range, Ranges, Report, Step
from halfstep.report import ReportText, page
from halfstep.report._shown import MOST_TENSORS, shown_tensors

COUNT, NAMES = 10_000, 2_000
FINE = Exponents({place: 100 - place for place in range(-12, 2)}, zeros=3, largest=2.5)
SMALL = Exponents({place: 100 - place for place in range(-30, -10)}, largest=9e-4)
LAST = f"blocks.{COUNT - 1}.layer"
FAULT = Fault(LAST, "matmul", "forward", "output", "inf", "float16", (2,), 9.0)


def row(place, role):
    lossy = role == "grad_output" and place % 100 == 0
    found = SMALL if lossy else FINE
    return Range(f"blocks.{place}.layer", role, found, found, "float16", ("matmul",))


@pytest.fixture(scope="module")
def report():
    names = tuple((f"blocks.{place}.layer.weight", "inf") for place in range(NAMES))
    updates = tuple((name, 0.5) for name, _ in names)
    rows = tuple(row(place, role) for place in range(COUNT) for role in ("output", "grad_output"))
    return Report(
        script="train.py",
        policy="mixed_float16",
        steps=tuple(Step(number, 1.0, 8.0, True, "inf", names) for number in range(1, 60)),
        ranges=Ranges(rows, updates=updates),
        diagnosis=Diagnosis((FAULT,)),
        casts=tuple(
            Cast("aten::linear", f"blocks.{place}.layer", 2, "float32", "float16", place)
            for place in range(COUNT)
        ),
    )


def test_a_page_stays_below_five_megabytes_and_says_what_it_leaves_out(report):
    text = page(report)
    assert len(text.encode()) < 5e6
    assert f"{MOST_TENSORS} of {2 * COUNT} tensors" in text
    assert "The tensors that lose the most; --json has all" in text
    assert f"and {NAMES - 5} more" in text


def test_what_is_left_out_is_what_loses_least(report):
    shown = shown_tensors(report)
    assert len(shown) == MOST_TENSORS
    places = [report.ranges.rows.index(each) for each in shown[:50]]
    assert places == sorted(places)
    told = {(each.module, each.role) for each in shown}
    assert {(f"blocks.{place}.layer", "grad_output") for place in range(0, COUNT, 100)} <= told
    assert (LAST, "output") in told


def test_a_terminal_gets_a_page_of_it(report):
    out = io.StringIO()
    Console(file=out, width=100).print(ReportText(report), crop=False)
    assert len(out.getvalue().splitlines()) < 100
    assert len(str(report.ranges).splitlines()) < 150


def test_what_is_written_is_read_again(report):
    few = Report(script="a", policy="b", ranges=Ranges(report.ranges.rows[:3000]))
    assert Report.from_dict(few.to_dict()) == few
