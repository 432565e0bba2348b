"""Whether a step was skipped because its data was far from that of all others."""

import math
from collections.abc import Sequence

from halfstep.core import Finding, Step
from halfstep.diagnose._heard import Evidence, Look
from halfstep.diagnose._usual import usual_of

_TIMES = 100.0
# More than so many are how the data is.
_IN_A_ROW = 2
_TOLD = (
    "At step {step}, numbers of up to {largest:.3g} went in, {times:,.0f} times as large as any in "
    "the other steps that were looked at, so {kind} was made, and skipping the step was right: "
    "look at its data."
)


def times_of(look: Look, evidence: Evidence) -> float:
    """Returns how many times as large as in other steps the numbers of a skipped one were.

    It is 0 unless they were far larger. Where the size of the data is not known, as of symbols,
    what became large is looked at, and the steps around have to be taken: a training that overflows
    by itself does so again at once.

    Args:
        look: The step, looked at closely.
        evidence: What is known of all steps.
    """
    fault, steps = look.report.diagnosis.first, evidence.report.steps
    if fault is None or not fault.breaks:
        return 0.0
    if _given(look):
        usual = max(map(_given, evidence.taken), default=0.0)
        return _times(_given(look), usual) if _is_brief(look.step, steps) else 0.0
    ranges = [each.report.ranges for each in evidence.taken if each.report.ranges.rows]
    usual = usual_of(ranges or [evidence.report.ranges], fault)
    return _times(fault.largest or 0.0, usual) if _is_alone(look.step, steps) else 0.0


def outlying(look: Look, evidence: Evidence) -> Finding:
    """Returns what there is to say of such a step.

    Args:
        look: The step, looked at closely.
        evidence: What is known of all steps.
    """
    fault = look.report.diagnosis.first
    assert fault is not None
    largest = max(_given(look), fault.largest or 0.0)
    words = {"step": look.step, "times": times_of(look, evidence), "kind": fault.kind}
    return Finding("warning", _TOLD.format(largest=largest, **words), fault.module)


def _given(look: Look) -> float:
    return 0.0 if look.sizes is None else look.sizes[0]


def _times(largest: float, usual: float) -> float:
    times = largest / usual if usual else 0.0
    return times if times >= _TIMES else 0.0


def _is_alone(number: int, steps: Sequence[Step]) -> bool:
    """Returns whether a step was skipped between two that were taken and had finite losses."""
    around = {step.number: step for step in steps if abs(step.number - number) <= 1}
    return (
        len(around) == 3
        and around[number].skipped
        and all(_is_sound(step) for place, step in around.items() if place != number)
    )


def _is_brief(number: int, steps: Sequence[Step]) -> bool:
    """Returns whether a step was skipped, and is in a row with few others that broke."""
    known = {step.number: step for step in steps}
    if number not in known or not known[number].skipped:
        return False
    first = last = number
    while first - 1 in known and not _is_sound(known[first - 1]):
        first -= 1
    while last + 1 in known and not _is_sound(known[last + 1]):
        last += 1
    return last - first < _IN_A_ROW


def _is_sound(step: Step) -> bool:
    return not step.skipped and (step.loss is None or math.isfinite(step.loss))
