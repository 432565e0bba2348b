import dataclasses
import io

import pytest
from rich.console import Console

from halfstep.core import Exponents, Finding, Range, Ranges, Report, Step
from halfstep.report import ReportText
from halfstep.report._visible import visible
from tests.report.reports import FAULT, REPORT, hostile


def printed(report, width=100, encoding="utf-8"):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, errors="backslashreplace")
    Console(file=file, width=width).print(ReportText(report), crop=False)
    file.flush()
    lines = [line.rstrip() for line in raw.getvalue().decode(encoding).splitlines()]
    assert max(len(line) for line in lines if line not in pasted(report)) <= width
    return lines


def pasted(report):
    found = [*report.findings, *report.diagnosis.faults]
    lines = [line for each in found for line in visible(each.remedy, lines=True).splitlines()]
    return {f"  {line}".rstrip() for line in lines}


def test_what_there_is_to_do_comes_first():
    lines = printed(REPORT)
    assert lines[0].startswith("train.py: 120 steps, 3 skipped; loss 2.522 to 0.1825; scale 65536")
    assert lines[1].startswith("  loss █")
    assert lines[4:7] == ["1 error, 1 warning, 1 note", lines[5], "  write:"]
    assert lines[5] == f"error: {FAULT.module}: Its output does not fit into float16."
    assert lines[7:9] == [f"  {line}" for line in REPORT.findings[0].remedy.splitlines()]


def test_the_first_fault_is_told_in_full():
    lines = printed(REPORT)
    start = lines.index("first fault") + 1
    assert lines[start : start + 3] == str(FAULT).splitlines()[:3]
    assert any(line.startswith("after it: head: softmax made nan") for line in lines)


def test_a_remedy_is_told_once():
    first, *_ = FAULT.remedy.splitlines()
    others = dataclasses.replace(REPORT, findings=())
    assert sum(first in line for line in printed(REPORT)) == 1
    assert sum(first in line for line in printed(others)) == 1


def test_what_is_to_be_pasted_stays_in_its_line():
    long = "rules = Rules()" + ".with_rule('matmul', 'full')" * 9
    report = Report(script="a.py", policy="b", findings=(Finding("note", "It is.", "", long),))
    assert f"  {long}" in printed(report, 40)


def test_the_tensors_that_lose_the_most():
    one, small = Exponents({0: 1}, largest=1.0), Exponents({-30: 3, -4: 1}, largest=0.1)
    rows = (
        ("fine", "output", one, one),
        ("some", "output", Exponents({-30: 1, 0: 3}, largest=1.0), one),
        ("most", "output", small, small),
        ("scaled", "grad_output", small, small),
        ("broken", "output", one, Exponents({0: 1}, nans=2, largest=1.0)),
    )
    rows = (*(Range(*row, "float16") for row in rows), Range("wide", "output", small, small))
    lines = printed(Report(script="a.py", policy="float16", ranges=Ranges(rows), power=6))
    start = lines.index("numbers that become 0 in float16, or are not finite")
    assert [line.split() for line in lines[start + 3 :]] == [
        ["broken", "output", "0", "%", "0", "2", "1"],
        ["most", "output", "75", "%", "0", "0", "0.1"],
        ["some", "output", "25", "%", "0", "0", "1"],
    ]


def test_the_casts_of_the_most_bytes():
    lines = printed(REPORT)
    start = lines.index("casts in one step, 576 KiB (8 of 16)")
    assert len(lines[start + 3 :]) == 8
    assert lines[start + 3].split()[-2:] == ["96", "KiB"]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_every_terminal_has_room(width, encoding):
    for report in (REPORT, hostile(), Report(script="a.py", policy="float32")):
        assert printed(report, width, encoding)


def test_names_cannot_move_what_is_written():
    text = "\n".join(printed(hostile(), 120))
    assert not set("\x1b\x00\u202e\u2028") & set(text)
    assert r"\x1b[31m" in text
    bracketed = dataclasses.replace(REPORT, findings=(Finding("note", "[red]x[/red]", "[a]"),))
    assert "note: [a]: [red]x[/red]" in printed(bracketed)


def test_the_end_of_a_failure_is_shown():
    error = "\n".join(["Traceback", *(f"line {index}" for index in range(20)), "ValueError: oh"])
    lines = printed(Report(script="a.py", policy="float32", steps=(Step(1),), error=error))
    start = lines.index("the script failed:")
    assert lines[start + 1 :] == [
        *(f"  line {index}" for index in range(13, 20)),
        "  ValueError: oh",
    ]
