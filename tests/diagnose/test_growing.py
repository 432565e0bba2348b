import dataclasses
import math

import pytest

from halfstep.core import Exponents, Range, Ranges
from halfstep.diagnose._growing import growth_of
from tests.diagnose.test_findings import FORWARD, found, look, steps, told, trained

ONE = Exponents({0: 4}, largest=1.0)
SEEN = Ranges((Range("ff", "input", ONE, ONE, "float16"),))


@pytest.mark.parametrize(
    ("losses", "steps"),
    [
        ([2.0, 1.0, 30.0, 900.0, math.inf], 2),
        ([2.0, None, 1.0, 30.0, 25.0, 900.0, 900.0, math.nan, 1.0], 4),
        ([-1.0, 5.0, -40.0, 900.0], 3),
    ],
)
def test_a_loss_that_grows(losses, steps):
    growth = growth_of(losses)
    assert (growth.first, growth.last, growth.steps) == (1.0, 900.0, steps)
    assert f"from 1 to 900 in the {steps} steps before" in str(growth)


def test_a_loss_that_breaks_at_once():
    growth = growth_of([1.56, 29704.0, math.inf, math.nan])
    assert (growth.first, growth.last, growth.steps) == (1.56, 29704.0, 1)
    assert "from 1.56 to 2.97e+04 in the step before" in str(growth)


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [1.0, 900.0],
        [900.0, 1.0, math.inf],
        [1.0, 50.0, math.inf],
        [math.nan],
        [2.0, 1.0, 0.5, math.inf],
        [2.0, 1.0, 0.5, 900.0, math.inf],  # one bad batch
        [9.0, 1e-4, 0.05, 0.5, math.inf],  # no worse than it began
        [1.0, 2.0, 4.0, 8.0, math.nan],
    ],
)
def test_a_loss_that_does_not(losses):
    assert growth_of(losses) is None


def examined(before, now, *, largest=200.0, since=1, outside=False):
    fault = None if outside else dataclasses.replace(FORWARD, largest=largest)
    usual = look(since, failed=False, sizes=before, ranges=SEEN)
    broken = look(3, fault, sizes=now, outside=outside)
    return found(trained(steps=steps(*range(3, 41))), usual, broken)


@pytest.mark.parametrize(
    ("now", "options"),
    [
        ((3.0, 4.1), {}),
        ((3.0, 21.0), {"largest": 9.0}),
        ((3.0, 21.0), {"outside": True}),
        ((29.0, 4.1), {"largest": math.inf}),
        ((0.0, 4.1), {}),
    ],
)
def test_parameters_that_grow_before_anything_is_told_of_the_loss(now, options):
    report = examined((3.0, 2.0), now, **options)
    first, second, *_ = report.findings
    assert first.text.startswith(
        f"The norm of the parameters grew from 2 at step 1 to {now[1]:g}: "
    )
    assert (first.severity, second.severity) == ("error", "error")
    assert not any(each.remedy for each in report.findings)


@pytest.mark.parametrize(
    ("before", "now", "options"),
    [
        ((3.0, 2.0), (3.0, 3.9), {}),  # they are as they were
        ((3.0, 2.0), (3.0, 4.1), {"largest": 90.0}),  # what they are multiplied with is
        ((3.0, 2.0), (31.0, 21.0), {}),  # the data is far larger
        ((3.0, 2.0), (3.0, math.inf), {}),
        ((3.0, 2.0), None, {}),
        (None, (3.0, 21.0), {}),
        ((3.0, 2.0), (3.0, 21.0), {"since": 5}),  # later
    ],
)
def test_what_is_no_divergence_keeps_its_rule(before, now, options):
    report = examined(before, now, **options)
    assert report.findings[0].remedy == "this"
    assert not any("diverges" in text for _, _, text in told(report))


@pytest.mark.parametrize("norms", [{"model": 2.0, "other": 90.0}, {"other": 90.0}])
def test_another_model_that_is_called_is_no_growth(norms):
    usual = look(1, failed=False, sizes=(3.0, 2.0), ranges=SEEN)
    broken = look(3, dataclasses.replace(FORWARD, largest=200.0), sizes=(3.0, 2.0))
    broken = dataclasses.replace(broken, sizes=(3.0, norms))
    report = found(trained(steps=steps(*range(3, 41))), usual, broken)
    assert report.findings[0].remedy == "this"
