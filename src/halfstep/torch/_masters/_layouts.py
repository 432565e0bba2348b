"""How a float32 master is kept: as the bits that its parameter lacks, or whole."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep.torch._dtypes import HALF, name_of
from halfstep.torch._masters._bits import merge, split
from halfstep.torch._masters._pieces import Piece, is_dense
from halfstep.torch._native._kernel import takes_kept

# What is kept under a name that tells how: plain tensors, for a state dict or a pickle.
Kept: TypeAlias = Mapping[str, Tensor]

WHOLE = "float16_master"
REMAINDERS = {dtype: f"{name_of(dtype)}_remainder" for dtype in HALF}
NAMES = {WHOLE, *REMAINDERS.values()}


def names_for(dtype: torch.dtype) -> set[str]:
    """Returns the names of what a parameter of a dtype can have; only float16 needs whole ones."""
    return {REMAINDERS[dtype], WHOLE} if dtype is torch.float16 else {REMAINDERS[dtype]}


class Master:
    """What a parameter in half precision lacks of a float32 number.

    Whatever else is written to the parameter, the master follows it to within its rounding, and
    exactly if it is zero.

    Args:
        parameter: The parameter.
        name: How the master is kept.
        tensor: What is kept.
    """

    def __init__(self, parameter: Tensor, name: str, tensor: Tensor) -> None:
        self.kept = {name: tensor}
        self._name = name
        # None for one that was loaded: its parameter may be loaded only after it.
        self._version: int | None = None
        self._place: tuple[Any, ...] = ()
        self._fits = False
        # Whether the compiled kernel takes it, with values that lie in memory like the parameter.
        self.is_quick = False
        # What an optimizer was shown in the place of the parameter as it lies now.
        self.stand: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickle needs no halfstep to be loaded.
        return OrderedDict, (), None, None, iter(self.kept.items())

    @property
    def tensor(self) -> Tensor:
        """What is kept."""
        return self.kept[self._name]

    def fits(self, parameter: Tensor) -> bool:
        """Returns whether the parameter still is what it was made for, wherever it was moved."""
        place = parameter.device, parameter.dtype, parameter.shape, parameter.stride()
        if place != self._place:
            self._place, self.stand = place, None
            self.kept[self._name] = beside(parameter, self.tensor)
            alike = self.tensor.shape == parameter.shape
            self._fits = alike and self._name in (WHOLE, REMAINDERS.get(parameter.dtype))
            self.is_quick = self._name != WHOLE and takes_kept(parameter, self.tensor)
        return self._fits

    def is_known(self, parameter: Tensor) -> bool:
        """Returns whether nobody else is known to have written to the parameter."""
        return self._version in (None, parameter._version)

    def is_written(self, piece: Piece, *, known: bool) -> None:
        """Notes that a piece has a new value, of a parameter that was known or was not."""
        if known or piece.ends:
            self._version = piece.parameter._version

    def is_moved(self, parameter: Tensor, *, known: bool) -> None:
        """Notes that a parameter was moved, and that nobody has written to it if it was known."""
        if known:
            self._version = parameter._version

    def read(self, piece: Piece, out: Tensor, *, known: bool | None = None) -> None:
        """Writes the exact value of a piece of the parameter, which may be said to be known."""
        self._read(piece, out)
        if not (self.is_known(piece.parameter) if known is None else known):
            low = piece.of(piece.parameter)
            out.copy_(torch.where(low == 0, low, out))

    def write(self, piece: Piece, value: Tensor) -> bool:
        """Takes over a value, and returns whether it could be kept exactly."""
        known = self.is_known(piece.parameter)
        exact = self._write(piece, value)
        self.is_written(piece, known=known)
        return exact

    def _read(self, piece: Piece, out: Tensor) -> None:
        raise NotImplementedError

    def _write(self, piece: Piece, value: Tensor) -> bool:
        raise NotImplementedError


class Split(Master):
    """The bits of a master that its parameter lacks, in 16 bits.

    Args:
        parameter: A parameter in bfloat16 or float16.
        remainder: The bits, None for those of the parameter's own value.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> master, piece = Split(parameter), Piece(parameter)
        >>> master.write(piece, torch.tensor([1.0 + 2.0**-20]))
        True
        >>> parameter.item(), exactly(master, piece).item() == 1.0 + 2.0**-20
        (1.0, True)
    """

    def __init__(self, parameter: Tensor, remainder: Tensor | None = None) -> None:
        own = torch.zeros_like(parameter.detach(), dtype=torch.int16)
        if remainder is not None:
            own.copy_(remainder)
        super().__init__(parameter, REMAINDERS[parameter.dtype], own)

    def _read(self, piece: Piece, out: Tensor) -> None:
        merge(piece.of(piece.parameter), piece.of(self.tensor), out)

    def _write(self, piece: Piece, value: Tensor) -> bool:
        return split(value, piece.of(piece.parameter), piece.of(self.tensor))


class Wide(Master):
    """A master that is kept whole, in float32.

    Args:
        parameter: A parameter in bfloat16 or float16.
        value: Its exact value.
    """

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        own = torch.empty_like(parameter.detach(), dtype=torch.float32).copy_(value)
        super().__init__(parameter, WHOLE, own)

    def _read(self, piece: Piece, out: Tensor) -> None:
        low, value = piece.of(piece.parameter), piece.of(self.tensor)
        torch.where(rounded(value, low.dtype) == low, value, low.float(), out=out)

    def _write(self, piece: Piece, value: Tensor) -> bool:
        low = piece.of(piece.parameter)
        piece.of(self.tensor).copy_(value)
        low.copy_(rounded(value, low.dtype))
        return True


def loaded(parameter: Tensor, kept: Kept) -> Master:
    """Returns a master as it was kept, whether or not the parameter's own value is there yet."""
    if WHOLE not in kept:
        return Split(parameter, kept[REMAINDERS[parameter.dtype]])
    wide, narrow = Wide(parameter, kept[WHOLE]), Split(parameter)
    low = torch.empty_like(parameter.detach())
    return narrow if split(wide.tensor, low, narrow.tensor) else wide


def exactly(master: Master, piece: Piece, *, known: bool | None = None) -> Tensor:
    """Returns the exact value of a piece of a parameter."""
    out = torch.empty_like(piece.of(piece.parameter), dtype=torch.float32)
    master.read(piece, out, known=known)
    return out


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a value in half precision, the largest finite one in place of an overflow."""
    largest = torch.finfo(dtype).max
    return value.clamp(-largest, largest).to(dtype)


def beside(parameter: Tensor, kept: Tensor) -> Tensor:
    """Returns what is kept for a parameter on its device, in the order of its numbers in memory.

    Both change when a model is moved, or brought to another memory format.
    """
    kept = kept.to(parameter.device)
    moved = kept.shape == parameter.shape and kept.stride() != parameter.stride()
    if not (moved and is_dense(parameter)):
        return kept
    return torch.empty_like(parameter.detach(), dtype=kept.dtype).copy_(kept)
