"""What is collected of the numbers of tensors, on their devices, and read in one go."""

from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.core import FORMATS, Exponents
from halfstep.torch._dtypes import name_of
from halfstep.torch._observing._counting import numbers_in
from halfstep.torch._observing._exponents import Tally
from halfstep.torch._observing._extremes import Extremes
from halfstep.torch._observing._ran import Value
from halfstep.torch._private import is_unallocated

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_KNOWN = frozenset(each.name for each in FORMATS)


class Collector(Protocol):
    """What is told of each tensor of a step once."""

    def add(self, tensor: Tensor, *, count: bool = False) -> int | None:
        """Returns the place of a tensor; None where it holds no numbers."""

    def read(self) -> None:
        """Waits for the devices."""

    def value(self, place: int | None, *rest: Any) -> Value:
        """Returns a tensor with what was read of it.

        Args:
            place: Its place.
            rest: Its role, the name of its format, its shape, and its own name.
        """


class Readings:
    """The extremes of many tensors, which stay on their devices until all are read.

    Example:
        >>> readings = Readings()
        >>> place = readings.add(torch.tensor([1.0, -2.0]))
        >>> readings.read()
        >>> readings.value(place, "output", "float32", (2,)).held
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

    def value(self, place: int | None, *rest: Any) -> Value:
        """Returns a tensor with its extremes."""
        return Value(None if place is None else self._read[place], *rest)


class Histograms:
    """The exponents of many tensors, which stay on their devices until all are read.

    Example:
        >>> histograms = Histograms()
        >>> place = histograms.add(torch.tensor([1.0, -2.0]))
        >>> histograms.read()
        >>> histograms.value(place, "output", "float32", (2,)).exponents.counts
        ((0, 1), (1, 1))
    """

    def __init__(self) -> None:
        self._tally, self._added = Tally[int](), 0
        self._read: dict[int, Exponents] = {}

    def add(self, tensor: Tensor, *, count: bool = False) -> int | None:
        """Returns the place of the exponents of a tensor; None where it holds no such numbers."""
        found = () if is_unallocated(tensor) else numbers_in(tensor)
        numbers = [each for each in found if name_of(each.dtype) in _KNOWN]
        if not numbers:
            return None
        self._tally.add(self._added, numbers)
        self._added += 1
        return self._added - 1

    def read(self) -> None:
        """Waits for the devices, once for each."""
        self._read = self._tally.read()

    def value(self, place: int | None, *rest: Any) -> Value:
        """Returns a tensor with its exponents."""
        value = Value(None, *rest)
        return value if place is None else value._replace(exponents=self._read[place])


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
