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


USUALLY, LARGE = (4.0, 1.0), (4e5, 1.0)


@pytest.mark.parametrize("skipped", [(1,), (40,), (7, 8), (1, 2), (39, 40)])
def test_data_that_is_known_to_be_far_may_be_anywhere(skipped):
    taken = look(10, failed=False, sizes=USUALLY)
    far = [look(each, FAR, sizes=LARGE) for each in skipped]
    report = found(trained(steps=steps(*skipped), ranges=RANGES), taken, *far)
    assert not report.diagnosis
    *warnings, losses, skips = report.findings
    assert [each.severity for each in warnings] == ["warning"] * len(skipped)
    assert all("numbers of up to 4e+05 went in, 100,000 times" in each.text for each in warnings)
    assert (losses.severity, skips.severity) == ("note", "note")


@pytest.mark.parametrize(
    ("sizes", "skipped"), [((390.0, 1.0), (40,)), (LARGE, (7, 8, 9)), (LARGE, (38, 39, 40))]
)
def test_data_that_is_not_or_that_stays_so_is_no_outlier(sizes, skipped):
    taken = look(5, failed=False, sizes=USUALLY)
    fault = dataclasses.replace(FAR, largest=390.0)
    far = [look(each, fault, sizes=sizes) for each in skipped]
    report = found(trained(steps=steps(*skipped), ranges=RANGES), taken, *far)
    assert report.findings[0].remedy == "this"


def test_a_step_is_not_compared_with_one_that_was_skipped():
    itself = look(1, failed=False, sizes=LARGE, ranges=RANGES)
    others = look(2, failed=False, sizes=USUALLY), look(1, FAR, sizes=LARGE)
    report = found(trained(steps=steps(1), ranges=RANGES), itself, *others)
    assert report.findings[0].text.startswith("At step 1, numbers of up to 4e+05 went in, 100,000")


def test_batches_that_are_far_again_and_again_are_a_fault():
    report = examined(FAR, *range(3, 40, 5))
    assert report.findings[0].remedy == "this"
    assert not any("look at its data" in text for _, _, text in told(report))


def test_a_loss_that_breaks_elsewhere_is_still_an_error():
    broken = (*steps(7)[:-1], Step(40, math.nan, 8.0))
    report = found(trained(steps=broken, ranges=RANGES), look(7, FAR))
    assert ("error", "", "2 of 40 losses are not finite.") in told(report)
