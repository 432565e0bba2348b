import json
import math

from halfstep.core import Report, Step
from halfstep.report._timeline import timeline


def columns(*steps):
    found = timeline(Report(script="a.py", policy="float32", steps=steps))
    json.dumps(found, allow_nan=False)
    return found


def test_what_is_not_finite_is_told_apart():
    found = columns(Step(1, math.nan, 8.0), Step(2, 0.5, None), Step(3, math.inf, 4.0, True, "why"))
    assert found["loss"] == [None, 0.5, None]
    assert found["scale"] == [8.0, None, 4.0]
    assert found["broken"] == [[1, "nan"], [3, "inf"]]
    assert found["skipped"] == [[3, "why"]]


def test_no_steps():
    assert columns() == {"step": [], "loss": [], "scale": [], "skipped": [], "broken": []}


def test_of_very_many_steps_all_that_matter_are_there():
    steps = [Step(number, 1.0, 8.0, skipped=number == 77_777) for number in range(1, 100_001)]
    steps[33_333] = Step(33_334, math.nan)
    found = columns(*steps)
    assert 2_000 < len(found["step"]) <= 4_100
    assert {1, 33_334, 77_777, 100_000} <= set(found["step"])
    assert found["step"] == sorted(found["step"])
