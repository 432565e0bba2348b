"""A step whose data was far from that of all others is no fault of a format."""

import dataclasses
import math

import pytest

from halfstep.core import Exponents, Range, Ranges, Step
from tests.diagnose.test_findings import FINE, FORWARD, found, look, told, trained

USUAL = Exponents({2: 4}, largest=4.0)
RANGES = Ranges((Range("ff", "input", USUAL, USUAL, "float16"),))
FAR = dataclasses.replace(FORWARD, operation="cast", role="input", largest=4e5)


def steps(*skipped):
    return tuple(
        dataclasses.replace(it, loss=math.inf, skipped=True) if it.number in skipped else it
        for it in FINE
    )


def examined(fault, *skipped):
    looks = (look(each, fault) for each in skipped)
    return found(trained(steps=steps(*skipped), ranges=RANGES), *looks)


@pytest.mark.parametrize("ranges", [RANGES, Ranges((Range("other", "input", USUAL, USUAL),))])
def test_one_batch_far_from_the_others_needs_no_rule(ranges):
    report = found(trained(steps=steps(7), ranges=ranges), look(7, FAR))
    warning, *others = report.findings
    assert (warning.severity, warning.module, warning.remedy) == ("warning", "ff", "")
    assert "step 7, numbers of up to 4e+05 went in, 100,000 times as large" in warning.text
    assert not report.diagnosis
    assert [each.severity for each in others] == ["note", "note"]


@pytest.mark.parametrize(
    ("largest", "skipped"), [(390.0, (7,)), (None, (7,)), (4e5, (7, 8)), (4e5, (40,)), (4e5, (1,))]
)
def test_what_is_not_that_keeps_its_rule(largest, skipped):
    report = examined(dataclasses.replace(FAR, largest=largest), *skipped)
    assert report.findings[0].remedy == "this"
    assert report.diagnosis


def test_batches_that_are_far_again_and_again_are_a_fault():
    report = examined(FAR, *range(3, 40, 5))
    assert report.findings[0].remedy == "this"
    assert not any("look at its data" in text for _, _, text in told(report))


def test_a_loss_that_breaks_elsewhere_is_still_an_error():
    broken = (*steps(7)[:-1], Step(40, math.nan, 8.0))
    report = found(trained(steps=broken, ranges=RANGES), look(7, FAR))
    assert ("error", "", "2 of 40 losses are not finite.") in told(report)
