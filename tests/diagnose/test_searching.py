import pytest

from halfstep.core import Step
from halfstep.diagnose._asking import Own
from halfstep.launch import RunResult
from tests.diagnose.test_findings import BACKWARD, found, look, told, trained
from tests.diagnose.test_outside import OWN, PLAIN
from tests.diagnose.test_writing import REGION

PREPARED = (Own("prepare", "mixed_float16", "a.py:5"),)


def searching(count, of=100, first=2.0**16):
    """Returns steps that are skipped until the scale has come down by half so many times."""
    return tuple(
        Step(number, 1.0, first / 2 ** min(number - 1, count), number <= count)
        for number in range(1, of + 1)
    )


def told_of(steps, fault=None, *, run=PLAIN, asked=OWN):
    looks = [look(it.number, fault, outside=fault is None) for it in steps if it.skipped][:8]
    return found(trained(steps=steps), *looks, run=run, asked=asked, overrides=False)


@pytest.mark.parametrize("fault", [None, BACKWARD])
def test_a_scale_that_takes_long_to_come_down_is_too_high(fault):
    warning, *others = told_of(searching(14), fault).findings
    assert (warning.severity, warning.text) == (
        "warning",
        "The first 14 steps were skipped: a loss scale of 65536 is too high to begin with, and "
        "steps are taken at 4.",
    )
    line = "scaler = GradScaler(init_scale=2.0**2)  # in place of the one in a.py:3"
    assert warning.remedy.splitlines()[-1] == line
    assert [each.severity for each in others] == ["note"]


def test_a_region_begins_with_the_scale_that_was_found():
    run = RunResult(**{**REGION.__dict__, "region_policies": ("mixed_float16",)})
    (warning, _) = told_of(searching(14), BACKWARD, run=run, asked=PREPARED).findings
    assert "dynamic(init_scale=4.0)" in warning.remedy


def test_a_short_search_is_a_note():
    assert [severity for severity, _, _ in told(told_of(searching(5)))] == ["note"]


def test_a_search_without_end_and_skips_after_it_are_errors():
    assert told_of(searching(60, of=60)).findings[0].severity == "error"
    steps = searching(14)
    skips = tuple(Step(it.number, 1.0, it.scale, it.number % 6 == 0) for it in steps[14:])
    assert told_of((*steps[:14], *skips)).findings[0].severity == "error"
