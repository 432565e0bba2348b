"""How a float32 master is kept: as the bits that its parameter lacks, or whole."""

from typing import Protocol

import torch
from torch import Tensor

from halfstep.torch._masters._bits import merge, split
from halfstep.torch._masters._pieces import Piece, is_dense


class Master(Protocol):
    """What a parameter in half precision lacks of a float32 number."""

    def tensors(self) -> list[Tensor]:
        """Returns what is kept."""

    def fits(self, parameter: Tensor) -> bool:
        """Returns whether the parameter is still what it was made for."""

    def read(self, piece: Piece, out: Tensor) -> None:
        """Writes the exact value of a piece of the parameter."""

    def write(self, piece: Piece, value: Tensor) -> bool:
        """Takes over a value, and returns whether it could be kept exactly."""


class Split:
    """The bits of a master that its parameter lacks, in 16 bits.

    Whatever else is written to the parameter, the master follows it to within its rounding.

    Args:
        parameter: A parameter in bfloat16 or float16.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> master, piece = Split(parameter), Piece(parameter)
        >>> master.write(piece, torch.tensor([1.0 + 2.0**-20]))
        True
        >>> parameter.item(), exactly(master, piece).item() == 1.0 + 2.0**-20
        (1.0, True)
    """

    def __init__(self, parameter: Tensor) -> None:
        self.remainder = torch.zeros_like(parameter.detach(), dtype=torch.int16)
        # What it completes: bits that bfloat16 lacks are others than those that float16 lacks.
        self.dtype = parameter.dtype

    def tensors(self) -> list[Tensor]:
        """Returns the remainder."""
        return [self.remainder]

    def fits(self, parameter: Tensor) -> bool:
        """Returns whether the parameter still has shape and dtype, wherever it was moved."""
        self.remainder = beside(parameter, self.remainder)
        return self.remainder.shape == parameter.shape and self.dtype is parameter.dtype

    def read(self, piece: Piece, out: Tensor) -> None:
        """Writes the exact value of a piece of the parameter."""
        merge(piece.of(piece.parameter), piece.of(self.remainder), out)

    def write(self, piece: Piece, value: Tensor) -> bool:
        """Takes over a value, and returns whether the remainder can hold it."""
        return split(value, piece.of(piece.parameter), piece.of(self.remainder))


class Wide:
    """A master that is kept whole, in float32.

    Where anything else has changed the parameter, the master follows it.

    Args:
        parameter: A parameter in bfloat16 or float16.
        value: Its exact value.
    """

    def __init__(self, parameter: Tensor, value: Tensor) -> None:
        self.value = torch.empty_like(parameter.detach(), dtype=torch.float32).copy_(value)

    def tensors(self) -> list[Tensor]:
        """Returns the master."""
        return [self.value]

    def fits(self, parameter: Tensor) -> bool:
        """Returns whether the parameter still has the shape, wherever it was moved."""
        self.value = beside(parameter, self.value)
        return self.value.shape == parameter.shape

    def read(self, piece: Piece, out: Tensor) -> None:
        """Writes the exact value of a piece of the parameter."""
        low, value = piece.of(piece.parameter), piece.of(self.value)
        torch.where(rounded(value, low.dtype) == low, value, low.float(), out=out)

    def write(self, piece: Piece, value: Tensor) -> bool:
        """Takes over a value."""
        low = piece.of(piece.parameter)
        piece.of(self.value).copy_(value)
        low.copy_(rounded(value, low.dtype))
        return True


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
