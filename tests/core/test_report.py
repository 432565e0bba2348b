import copy
import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.core import Cast, Diagnosis, Exponents, Fault, Finding, Range, Ranges, Report, Step
from halfstep.errors import ReportError
from tests.core.strategies import REPORTS

FAULT = Fault("block.ff", "matmul", "forward", "output", "inf", "float16", (2, 64), 1200.0)
EXPONENTS = Exponents({-3: 2, 0: 1}, 1, largest=1.5)
REPORT = Report(
    script="train.py",
    policy="mixed_float16",
    versions=(("torch", "2.13.0"),),
    steps=(Step(1, 0.5, 65536.0), Step(2, math.inf, 65536.0, True, "why", (("w", "inf"),))),
    sampled=(1,),
    diagnosis=Diagnosis((FAULT,), 65536.0),
    ranges=Ranges((Range("block", "output", EXPONENTS, EXPONENTS, "float16"),)),
    casts=(Cast("aten::linear", "block", 2, "float32", "float16", 64),),
    findings=(Finding("error", "It broke.", "block", "write this"),),
)


RUN = ("ranges", "rows", 0, "run")


def put(data, path, value):
    *parents, last = path
    for key in parents:
        data = data[key]
    data[last] = value


def test_skipped_steps():
    assert REPORT.skipped == (REPORT.steps[1],)


def test_what_is_lost_depends_on_the_scale_in_force():
    exponents = Exponents({-30: 3, -4: 1}, largest=0.1)
    gradient = Range("a", "grad_weight", exponents, exponents)
    output = Range("a", "output", exponents, exponents)
    for power, expected in ((0, 0.75), (5, 0.0)):
        report = dataclasses.replace(REPORT, ranges=Ranges((gradient, output)), power=power)
        assert report.lost(gradient) == expected
        assert report.lost(output) == 0.75
        assert report.lost(gradient, "bfloat16") == 0.0


def test_numbers_that_json_lacks_are_text():
    data = REPORT.to_dict()
    assert data["steps"][1]["loss"] == "inf"
    text = json.dumps(data, allow_nan=False)
    assert Report.from_dict(json.loads(text)) == REPORT


def test_nan_comes_back():
    report = Report(script="a", policy="b", steps=(Step(1, math.nan), Step(2, -math.inf)))
    first, second = Report.from_dict(report.to_dict()).steps
    assert math.isnan(first.loss)
    assert second.loss == -math.inf


def test_whole_numbers_serve_where_a_fraction_is_expected():
    data = REPORT.to_dict()
    put(data, ("steps", 0, "loss"), 1)
    assert type(Report.from_dict(data).steps[0].loss) is float


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("format",), "halfstep-doctor-2", "Report needs the format 'halfstep-doctor-1', got"),
        (("policy",), None, "Report.policy needs to be a text, got None"),
        (("steps",), "none", "Report.steps needs to be a list, got 'none'"),
        (("steps",), {"0": 1}, "Report.steps needs to be a list, got {'0': 1}"),
        (("steps", 1), [1], r"Report.steps\[1\] needs to be a dict, got \[1\]"),
        (("steps", 0, "number"), True, r"Report.steps\[0\].number needs to be a whole number, got"),
        (("steps", 0, "number"), 0, r"In Report.steps\[0\]: Step needs number at least 1, got 0"),
        (("steps", 0, "loss"), "low", r"steps\[0\].loss needs to be a number, .*, got 'low'"),
        (("steps", 0, "loss"), 10**400, r"steps\[0\].loss needs to be a number"),
        (("steps", 0, "skipped"), 1, r"steps\[0\].skipped needs to be true or false, got 1"),
        (("steps", 1, "nonfinite", 0), ["w"], r"nonfinite\[0\] needs to be a list of 2, got \['w"),
        (("steps", 1, "nonfinite", 0, 1), "big", "Step needs nonfinite among inf, nan, inf and"),
        (("steps", 0, "lost"), 1, r"Report.steps\[0\] needs keys among number, .*mean 'loss'\?"),
        (("ranges", "rows", 0, "form"), "fp16", "Report needs ranges among float64"),
        (("ranges", "form"), "fp16", "Report needs ranges among float64"),
        (("ranges", "rows", 0, "run"), 3, r"ranges.rows\[0\].run needs to be a dict, got 3"),
        ((*RUN, "counts", 0, 0), 10**9, r"In Report.ranges.rows\[0\].run: Exponents needs exponen"),
        ((*RUN, "counts", 0, 1), -1, "Exponents needs counts >= 0, got -1"),
        ((*RUN, "nans"), -1, "Exponents needs counts >= 0, got -1"),
        ((*RUN, "largest"), 9.0, "Exponents needs largest= the largest"),
        (("casts", 0, "bytes"), -1, "Cast needs bytes at least 0, got -1"),
        (("casts", 0, "count"), -1, "Cast needs count at least 0, got -1"),
        (("findings", 0, "severity"), "bad", "Finding needs severity among error, warning, note"),
        (("diagnosis", "faults", 0, "dtype"), "x", "Report needs diagnosis among float64"),
        (("diagnosis", "faults", 0, "shape"), [2.5], r"faults\[0\].shape\[0\] needs to be a whole"),
        (("<b>",), 1, "Report needs keys among script, policy, .*, got '<b>'. Pass what to_dict"),
    ],
)
def test_a_malformed_report_is_refused_with_what_is_wrong_and_where(path, value, text):
    data = copy.deepcopy(REPORT.to_dict())
    put(data, path, value)
    with pytest.raises(ReportError, match=text):
        Report.from_dict(data)


@pytest.mark.parametrize("data", [None, [], "text", {}, {"format": ["x" * 900]}])
def test_other_data_is_refused_briefly(data):
    with pytest.raises(ReportError, match="Report needs the format 'halfstep-doctor-1', got") as it:
        Report.from_dict(data)
    assert len(str(it.value)) < 250


def test_a_missing_field_is_named():
    data = REPORT.to_dict()
    del data["steps"][0]["number"]
    with pytest.raises(ReportError, match=r"Report.steps\[0\] needs number, got only loss, scale"):
        Report.from_dict(data)


def test_a_long_value_is_shown_in_a_line():
    data = REPORT.to_dict() | {"policy": ["x" * 10_000] * 10_000}
    with pytest.raises(ReportError) as it:
        Report.from_dict(data)
    assert len(str(it.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(REPORTS, st.data())
def test_anything_in_the_place_of_a_field_is_taken_or_refused(report, data):
    written = report.to_dict()
    written[data.draw(st.sampled_from(sorted(written)))] = data.draw(JSON)
    try:
        read = Report.from_dict(written)
    except ReportError:
        return
    assert Report.from_dict(read.to_dict()).to_dict() == read.to_dict()
