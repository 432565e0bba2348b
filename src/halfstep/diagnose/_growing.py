"""Whether a training diverges, as its losses tell."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

# Losses that rise so often in a row, and by so much, do not come from one bad batch.
_RISES, _FACTOR = 3, 100.0


class Growth(NamedTuple):
    """How the loss has grown.

    Args:
        first: The loss before it grew.
        last: The last one that is finite.
        steps: In how many steps.
    """

    first: float
    last: float
    steps: int

    def __str__(self) -> str:
        return (
            f"The loss grew from {self.first:.3g} to {self.last:.3g} in {self.steps} steps before: "
            "the training diverges, which no format helps. Lower the learning rate, or clip the "
            "gradients."
        )


def growth_of(losses: Sequence[float | None]) -> Growth | None:
    """Returns how the last finite losses have grown, None where they have not by much.

    Args:
        losses: The loss of each step, None where none was seen.

    Example:
        >>> growth_of([2.0, 1.0, 4.0, 70.0, 9000.0, math.inf])
        Growth(first=1.0, last=9000.0, steps=3)
        >>> growth_of([1.0, 0.9, 0.8, math.inf])
    """
    known = (abs(each) for each in losses if each is not None)
    finite = list(itertools.takewhile(math.isfinite, known))
    start = len(finite) - 1
    while start > 0 and finite[start - 1] < finite[start]:
        start -= 1
    steps = len(finite) - 1 - start
    if steps < _RISES or finite[-1] < _FACTOR * finite[start]:
        return None
    return Growth(finite[start], finite[-1], steps)
