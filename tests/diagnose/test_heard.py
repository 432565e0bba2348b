"""What a process tells of several steps, as one report."""

import pytest

from halfstep.core import Cast, Exponents, Range, Ranges, Report, Step
from halfstep.diagnose._heard import Heard
from tests.diagnose.test_findings import FORWARD, Diagnosis

ONE = Exponents({0: 4}, largest=1.0)


def told(number, *modules, only=None, failed=False, fault=None, values=ONE):
    rows = tuple(Range(each, "output", values, values, "float16") for each in modules)
    casts = tuple(Cast("aten::linear", each, 1, "float32", "float16", 8) for each in modules)
    found = Diagnosis((fault,) if fault else ())
    seen = {"ranges": Ranges(rows), "casts": casts, "diagnosis": found}
    report = Report(script="", policy="", sampled=(number,), **seen)
    message = {"kind": "look", "failed": failed, "outside": False, "only": only}
    return {**message, "report": report.to_dict()}


def heard(*messages, skipped=()):
    found = Heard("mixed_float16")
    steps = tuple(Step(number, 1.0, 8.0, number in skipped) for number in range(1, 4))
    report = Report(script="", policy="", steps=steps).to_dict()
    for each in ({"kind": "steps", "report": report}, *messages):
        found.add(each)
    return found.report("a.py", "", lambda evidence: evidence.report)


@pytest.mark.parametrize("later", [None, ["decoder", "Net"]])
def test_a_model_has_its_name_where_another_step_has_others(later):
    others = ("encoder.0", "decoder.0") if later is None else ("0",)
    first = told(1, "0", "Net", only=["encoder", "Net"], fault=FORWARD)
    report = heard(first, told(2, *others, only=later))
    assert set(report.ranges.modules) == {"encoder.0", "encoder", "decoder.0"}
    assert [each.module for each in report.casts] == ["encoder.0", "encoder"]
    assert report.diagnosis.first.module == "encoder.ff"


def test_the_only_model_of_all_steps_has_plain_names():
    both = (told(number, "0", only=["model", "Net"], fault=FORWARD) for number in (1, 2))
    report = heard(*both)
    assert (report.ranges.modules, report.diagnosis.first.module) == (("0",), "ff")


@pytest.mark.parametrize(("skipped", "largest"), [((1,), 1.0), ((), 9.0), ((1, 2), 9.0)])
def test_steps_that_were_skipped_count_only_where_there_are_no_others(skipped, largest):
    first = told(1, "0", values=Exponents({3: 4}, largest=9.0))
    report = heard(first, told(2, "0"), skipped=skipped)
    assert report.ranges.rows[0].run.largest == largest
