"""What casting a tensor takes, by its size."""

import bisect
import math
from dataclasses import dataclass
from typing import Self

import torch

from halfstep.torch._planning._recording import Source
from halfstep.torch._planning._timing import Turn, alternate, plainly

_SIZES = tuple(2**power for power in (8, 12, 16, 18, 20, 22))
_BYTES = 2  # of a number in a low format


@dataclass(frozen=True)
class Casting:
    """How long it takes to cast tensors.

    Args:
        measured: The seconds for each of the sizes that are measured.
    """

    measured: tuple[float, ...]

    @classmethod
    def on(cls, device_type: str, low: torch.dtype, budget: float) -> Self:
        """Measures it.

        Args:
            device_type: Where the tensors are.
            low: The low format.
            budget: The seconds that measuring may take.
        """
        spent = alternate([_cast(size, device_type, low) for size in _SIZES], device_type, budget)
        return cls(tuple(each.seconds for each in spent))

    @property
    def per_byte(self) -> float:
        """How long it takes to write a byte, of a tensor that is too large for a cache."""
        return self.measured[-1] / (_SIZES[-1] * _BYTES)

    def seconds(self, source: Source) -> float:
        """Returns how long it takes for a tensor, forward, and backward if it has a gradient."""
        return self._once(math.prod(source.shape)) * (1 + source.trained)

    def _once(self, size: int) -> float:
        """Returns a time on a line between those that were measured; beyond them, in proportion."""
        place = bisect.bisect_left(_SIZES, size)
        if place in (0, len(_SIZES)):
            end = min(place, len(_SIZES) - 1)
            return self.measured[end] * max(1.0, size / _SIZES[end])
        (below, above), (low, high) = (
            _SIZES[place - 1 : place + 1],
            self.measured[place - 1 : place + 1],
        )
        return low + (high - low) * (size - below) / (above - below)


def _cast(size: int, device_type: str, low: torch.dtype) -> Turn:
    values = torch.ones(size, device=device_type)
    return plainly(lambda: values.to(low))
