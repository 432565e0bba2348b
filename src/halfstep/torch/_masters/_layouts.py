"""How a float32 master is kept: as the bits that its parameter lacks, or whole."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from halfstep.torch._dtypes import HALF, name_of
from halfstep.torch._masters._bits import merge, split
from halfstep.torch._masters._pieces import Piece, is_dense

# What is kept under a name that tells how: plain tensors, for a state dict or a pickle.
Kept: TypeAlias = Mapping[str, Tensor]

WHOLE = "master"
REMAINDERS = {dtype: f"{name_of(dtype)}_remainder" for dtype in HALF}
NAMES = {WHOLE, *REMAINDERS.values()}


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

    @property
    def tensor(self) -> Tensor:
        """What is kept."""
        return self.kept[self._name]

    def fits(self, parameter: Tensor) -> bool:
        """Returns whether the parameter still is what it was made for, wherever it was moved."""
        self.kept[self._name] = beside(parameter, self.tensor)
        return self.tensor.shape == parameter.shape and self._name in (
            WHOLE,
            REMAINDERS.get(parameter.dtype),
        )

    def read(self, piece: Piece, out: Tensor) -> None:
        """Writes the exact value of a piece of the parameter."""
        self._read(piece, out)
        if self._version not in (None, piece.parameter._version):
            low = piece.of(piece.parameter)
            out.copy_(torch.where(low == 0, low, out))

    def write(self, piece: Piece, value: Tensor) -> bool:
        """Takes over a value, and returns whether it could be kept exactly."""
        parameter = piece.parameter
        known = self._version in (None, parameter._version)
        exact = self._write(piece, value)
        if known or piece.ends:
            self._version = parameter._version
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


def exactly(master: Master, piece: Piece) -> Tensor:
    """Returns the exact value of a piece of a parameter."""
    out = torch.empty_like(piece.of(piece.parameter), dtype=torch.float32)
    master.read(piece, out)
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
