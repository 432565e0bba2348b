"""Whether a training diverges, as its losses tell."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# What is so much larger than the smallest loss, and than the first, does not come down again.
_OF_LEAST, _OF_FIRST = 100.0, 10.0
# One bad batch is one step, except that no loss before it says what is usual.
_STEPS = 2


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
