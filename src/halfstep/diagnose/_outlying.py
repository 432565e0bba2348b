"""Whether a step was skipped because its data was far from that of all others."""

import math
from collections.abc import Sequence

from halfstep.core import FORWARD, Fault, Finding, Ranges, Step
from halfstep.diagnose._heard import Evidence, Look

_TIMES = 100.0
_TOLD = (
    "At step {step}, numbers of up to {largest:.3g} went in, {times:,.0f} times as large as any in "
    "the other steps that were looked at, so {kind} was made, and skipping the step was right: "
    "look at its data."
)


def times_of(look: Look, evidence: Evidence) -> float:
    """Returns how many times as large as in other steps the numbers of a skipped one were.

    It is 0 unless they were far larger, and the steps around it were taken: a training that
    overflows by itself does so again at once.

    Args:
        look: The step, looked at closely.
        evidence: What is known of all steps.
    """
    fault = look.report.diagnosis.first
    if fault is None or not fault.breaks or not _is_alone(look.step, evidence.report.steps):
        return 0.0
    usual = _usual(evidence.report.ranges, fault)
    times = (fault.largest or 0.0) / usual if usual else 0.0
    return times if times >= _TIMES else 0.0


def outlying(look: Look, evidence: Evidence) -> Finding:
    """Returns what there is to say of such a step.

    Args:
        look: The step, looked at closely.
        evidence: What is known of all steps.
    """
    fault = look.report.diagnosis.first
    assert fault is not None
    largest, times = fault.largest, times_of(look, evidence)
    text = _TOLD.format(step=look.step, largest=largest, times=times, kind=fault.kind)
    return Finding("warning", text, fault.module)


def _usual(ranges: Ranges, fault: Fault) -> float:
    """Returns the largest number in the forward passes of a module, or else of all."""
    rows = [row for row in ranges.rows if row.role in FORWARD]
    own = [row for row in rows if row.module == fault.module]
    return max((row.reference.largest for row in own or rows), default=0.0)


def _is_alone(number: int, steps: Sequence[Step]) -> bool:
    """Returns whether a step was skipped between two that were taken and had finite losses."""
    around = {step.number: step for step in steps if abs(step.number - number) <= 1}
    return (
        len(around) == 3
        and around[number].skipped
        and all(_is_sound(step) for place, step in around.items() if place != number)
    )


def _is_sound(step: Step) -> bool:
    return not step.skipped and (step.loss is None or math.isfinite(step.loss))
