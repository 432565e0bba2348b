import dataclasses
import io
import re

import pytest
from rich.console import Console

from halfstep.core import Change, Diagnosis, Exponents, Finding, Range, Ranges, Report, Step
from halfstep.report import ReportText
from halfstep.report._numbers import UNKNOWN
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
    remedies = [each.remedy for each in (*report.findings, *report.diagnosis.faults)]
    whole = (*remedies, report.remedies.text)
    lines = [line for each in whole for line in visible(each, lines=True).splitlines()]
    return {f"  {line}".rstrip() for line in lines}


def test_what_there_is_to_do_comes_first():
    lines = printed(REPORT)
    assert lines[0].startswith("train.py: 120 steps, 3 skipped; loss 2.522 to 0.1825; scale 65536")
    assert lines[1].startswith("  loss █")
    assert lines[4] == "1 error, 1 warning, 1 note"
    assert lines[5] == f"error: {FAULT.module}: Its output does not fit into float16."
    start = lines.index("  its part:") + 1
    assert lines[start : start + 2] == [f"  {it}" for it in REPORT.findings[0].remedy.splitlines()]


def test_several_remedies_are_written_as_one_below_all_findings():
    low, high = (
        Change(f"scaler = GradScaler(init_scale=2.0**{power})", "scaler", scale=str(power))
        for power in (4, 20)
    )
    masters = Change("keep_masters(optimizer)", "parameters")
    told = (("error", "a", low), ("warning", "b", high), ("warning", "c", masters))
    found = [Finding(kind, "So.", name, it.use, (it,)) for kind, name, it in told]
    lines = printed(Report(script="a.py", policy="b", findings=tuple(found)))
    start = lines.index("what to write")
    assert lines[start + 1 :] == [
        "  all in one:",
        "  from halfstep.torch import GradScaler, keep_masters",
        "  scaler = GradScaler(init_scale=2.0**4)",
        "  keep_masters(optimizer)",
        "  only after that, for it contradicts it: b: So.",
    ]
    assert lines.count("  its part:") == 3
    assert "write" not in str(printed(Report(script="a.py", policy="b", findings=found[:0])))


def test_the_first_fault_is_told_in_full_where_it_is_found():
    lines = printed(REPORT)
    start = lines.index(f"error: {FAULT.module}: Its output does not fit into float16.") + 1
    assert lines[start : start + 4] == [
        *str(FAULT).splitlines()[1:3],
        "  at loss scale 65536",
        "  after it: head: softmax made nan in the forward pass, in float16, which ends at 65504",
    ]
    assert "first fault" not in lines


def test_a_fault_that_no_finding_tells_of_has_a_place_of_its_own():
    other = Finding("warning", "It loses more.", "head", FAULT.remedy)
    lines = printed(dataclasses.replace(REPORT, findings=(other,)))
    start = lines.index("first fault") + 1
    assert lines[start : start + 3] == str(FAULT).splitlines()[:3]
    assert lines.index("  write:") < lines.index("  write: as above")


def test_a_remedy_is_told_once():
    first, *_ = FAULT.remedy.splitlines()
    others = dataclasses.replace(REPORT, findings=())
    assert sum(first in line for line in printed(REPORT)) == 2  # its part, and all in one
    assert sum(first in line for line in printed(others)) == 1


def test_findings_of_the_same_remedy_tell_it_once():
    alike = [Finding("warning", "Its updates are lost.", name, "masters='split'") for name in "abc"]
    lines = printed(Report(script="a.py", policy="b", findings=tuple(alike)))
    assert lines.count("  masters='split'") == 1
    assert lines.count("  write: as above") == 2


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


def table(lines):
    """Returns the words of the rows of the first table."""
    start = next(index for index, line in enumerate(lines) if "or are not finite" in line)
    rows = lines[start + 3 :]
    return [line.split() for line in rows[: [*rows, ""].index("")]]


def broken(*more):
    """Returns a report of a fault whose gradients, which are many, are NaN."""
    one, lost = Exponents({0: 9}, largest=1.0), Exponents(zeros=512)
    fault = dataclasses.replace(FAULT, module="stem")
    rows = [Range(f"layer{each}", "grad_output", lost, Exponents(nans=512)) for each in range(20)]
    made = Range("stem", "output", one, Exponents({0: 8}, infs=1, largest=1.0), "float16")
    ranges = Ranges((*rows, *(Range(each.module, "output", one, one, "float16") for each in rows)))
    rows = (*ranges.rows, *([made] if "counted" in more else []))
    return Report(
        script="a.py",
        policy="b",
        diagnosis=Diagnosis((fault,)),
        ranges=Ranges(rows),
        steps=(Step(1),),
    )


def test_the_tensor_of_the_first_fault_is_always_there_and_the_first():
    assert table(printed(broken("counted")))[0] == ["stem", "output", "0", "%", "1", "0", "1"]
    assert table(printed(broken()))[0] == ["stem", "output", UNKNOWN, "yes", "0", UNKNOWN]


def test_what_a_forward_pass_made_comes_before_what_follows_from_it():
    report = broken("counted")
    lost = Exponents(nans=9)
    forward = [Range(name, "output", lost, lost, "float16") for name in ("head", "a")]
    ranges = Ranges((*report.ranges.rows, *forward))
    names = [row[0] for row in table(printed(dataclasses.replace(report, ranges=ranges)))]
    assert names[:4] == ["stem", "head", "a", "layer0"]


def test_what_was_not_finite_is_not_called_zero():
    rows = table(printed(broken()))
    assert rows[1] == ["layer0", "grad_output", UNKNOWN, "0", "all", "512", "NaN"]
    line = "layer0 | grad_output |        - |   0 | all 512 |     NaN"
    assert line in printed(broken(), 80, "ascii")


def test_a_narrow_terminal_lacks_columns_in_a_known_order():
    found = []
    for width in range(70, 14, -1):
        text = " ".join(printed(broken("counted"), width))
        found += re.findall(r"no room for: ([\w, ]+?)  ", f"{text}  ")[:1]
    lacking = [name for names in dict.fromkeys(found) for name in names.split(", ")]
    assert list(dict.fromkeys(lacking)) == ["largest", "become 0", "inf", "NaN", "tensor"]


@pytest.mark.parametrize("width", [20, 40, 80, 200])
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
