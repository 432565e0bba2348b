"""The smallest and the largest number of tensors, computed on the device and read in one go."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.torch._private import is_unallocated

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Extremes(NamedTuple):
    """What is known of the numbers of a tensor.

    Args:
        low: The smallest; NaN if there is any.
        high: The largest; NaN if there is any.
        nonzeros: How many are not zero, -1 where nobody counted.
    """

    low: float
    high: float
    nonzeros: int = -1

    @property
    def finite(self) -> bool:
        """Whether all numbers are.

        Example:
            >>> Extremes(-1.0, math.inf).finite
            False
        """
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def has_nan(self) -> bool:
        """Whether one is NaN."""
        return math.isnan(self.low)

    @property
    def only_minus_inf(self) -> bool:
        """Whether what is not finite is -inf.

        Example:
            >>> Extremes(-math.inf, 2.0).only_minus_inf
            True
        """
        return self.low == -math.inf and self.high < math.inf

    @property
    def largest(self) -> float | None:
        """The largest magnitude at an end that is finite, None if neither is."""
        return max((abs(each) for each in self[:2] if math.isfinite(each)), default=None)


class Readings:
    """The extremes of many tensors, which stay on their devices until all are read.

    Example:
        >>> readings = Readings()
        >>> place = readings.add(torch.tensor([1.0, -2.0]))
        >>> readings.read()
        >>> readings[place]
        Extremes(low=-2.0, high=1.0, nonzeros=-1)
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, ...]] = []
        self._read: list[Extremes] = []

    def add(self, tensor: Tensor, *, count: bool = False) -> int | None:
        """Returns the place of the extremes of a tensor; None where it holds no such numbers.

        Args:
            tensor: The tensor.
            count: Whether to count zeros, too.
        """
        numbers = _numbers(tensor)
        if numbers is None:
            return None
        found = tuple(torch.aminmax(numbers))
        self._pending.append((*found, torch.count_nonzero(numbers)) if count else found)
        return len(self._read) + len(self._pending) - 1

    def read(self) -> None:
        """Waits for the devices, once for each and for each format."""
        values = _on_host([each for entry in self._pending for each in entry])
        for entry in self._pending:
            low, high, *nonzeros = (values[id(each)] for each in entry)
            self._read.append(Extremes(low, high, *map(int, nonzeros)))
        self._pending.clear()

    def __getitem__(self, place: int) -> Extremes:
        return self._read[place]


def _on_host(scalars: list[Tensor]) -> dict[int, float]:
    kinds: dict[Any, list[Tensor]] = {}
    for each in scalars:
        kinds.setdefault((each.device, each.dtype), []).append(each)
    return {
        id(each): value
        for group in kinds.values()
        for each, value in zip(group, torch.stack(group).tolist(), strict=True)
    }


def _numbers(tensor: Tensor) -> Tensor | None:
    """Returns the numbers of a tensor of floats that has any, on a device that has them."""
    if tensor.is_sparse:
        tensor = tensor._values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    known = tensor.dtype in _FLOATS and tensor.layout is torch.strided
    wraps = tensor.is_meta or hasattr(type(tensor), "__tensor_flatten__")
    empty = wraps or not tensor.numel() or is_unallocated(tensor)
    return tensor if known and not empty else None
