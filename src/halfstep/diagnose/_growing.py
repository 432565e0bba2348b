"""Whether a training diverges, as its losses or its parameters tell."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from halfstep.diagnose._heard import Evidence, Look
from halfstep.diagnose._usual import usual_of

# What is so much larger than the smallest loss, and than the first, does not come down again.
_OF_LEAST, _OF_FIRST = 100.0, 10.0
# One bad batch is one step, except that no loss before it says what is usual.
_STEPS = 2
# All parameters of a training that goes well do not double between two looks at it while the data
# stays as it is and what they are multiplied with grows a hundredfold, let alone grow tenfold.
_OF_NORM, _ALONE, _OF_DATA = 2.0, 10.0, 10.0


class Growth(NamedTuple):
    """How the loss has grown.

    Args:
        first: The smallest loss.
        last: The last one that is finite.
        steps: How many steps are between them.
    """

    first: float
    last: float
    steps: int

    def __str__(self) -> str:
        return (
            f"The loss grew from {self.first:.3g} to {self.last:.3g} in the {_steps(self.steps)} "
            "before: the training diverges, in whatever format. Lower the learning rate, or clip "
            "the gradients."
        )


class Swelling(NamedTuple):
    """How the parameters have grown, and with them what they are multiplied with.

    Args:
        since: The step that they are compared with.
        before: Their norm before that step.
        norm: Their norm now.
    """

    since: int
    before: float
    norm: float

    def __str__(self) -> str:
        return (
            f"The norm of the parameters grew from {self.before:.3g} at step {self.since} to "
            f"{self.norm:.3g}: the training diverges, in whatever format. Lower the learning "
            "rate, or clip the gradients."
        )


def swelling_of(look: Look, evidence: Evidence) -> Swelling | None:
    """Returns how the parameters have grown before a step broke, None where they have not by much.

    Args:
        look: The step, looked at closely.
        evidence: What is known of all steps.
    """
    earlier = next((it for it in reversed(evidence.taken) if it.step < look.step), None)
    if earlier is None or earlier.sizes is None or look.sizes is None:
        return None
    (usual, first), (given, last) = earlier.sizes, look.sizes
    # A model that was not called in one of the steps has not grown.
    before, norm = (math.hypot(*(each[it] for it in first if it in last)) for each in (first, last))
    known = before > 0.0 and math.isfinite(norm)
    if not known or given > _OF_DATA * usual or norm < _OF_NORM * before:
        return None
    large = norm >= _ALONE * before or _grew(look, earlier)
    return Swelling(earlier.step, before, norm) if large else None


def _grew(look: Look, earlier: Look) -> bool:
    """Returns whether what went into the operation that broke had grown a hundredfold."""
    fault = look.report.diagnosis.first
    if fault is None or not fault.breaks:
        return False
    usual = usual_of([earlier.report.ranges], fault)
    return usual > 0.0 and (fault.largest or 0.0) >= _OF_LEAST * usual


def growth_of(losses: Sequence[float | None]) -> Growth | None:
    """Returns how the last finite losses have grown, None where they have not by much.

    Args:
        losses: The loss of each step, None where none was seen.

    Example:
        >>> growth_of([2.0, 1.0, 4.0, 70.0, 9000.0, math.inf])
        Growth(first=1.0, last=9000.0, steps=3)
        >>> growth_of([1.0, 0.9, 0.8, math.inf])
        >>> growth_of([1.0, 9000.0, math.inf])
        Growth(first=1.0, last=9000.0, steps=1)
    """
    known = [abs(each) for each in losses if each is not None]
    finite = list(itertools.takewhile(math.isfinite, known))
    if not finite:
        return None
    least, last = min(finite), finite[-1]
    steps = finite[::-1].index(least)
    large = last >= _OF_LEAST * least and last >= _OF_FIRST * finite[0]
    at_once = len(finite) == _STEPS and len(known) > _STEPS
    return Growth(least, last, steps) if large and (at_once or steps >= _STEPS) else None


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
