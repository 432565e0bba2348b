"""Parts of parameters that an optimizer is fed with at a time."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """A parameter, or some of its numbers in the order in which they lie in memory.

    Args:
        parameter: The parameter.
        start: The first of its numbers.
        stop: The one after the last, None for the parameter as it is.
    """

    parameter: Tensor
    start: int = 0
    stop: int | None = None

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return self.parameter.numel() if self.stop is None else self.stop - self.start

    @property
    def ends(self) -> bool:
        """Whether the last of the parameter's numbers is in it."""
        return self.stop in (None, self.parameter.numel())

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the same part of the parameter, or of a tensor that is laid out like it."""
        tensor = tensor.detach() if tensor.requires_grad else tensor
        return tensor if self.stop is None else flat(tensor)[self.start : self.stop]

    def within(self, numbers: Tensor, start: int) -> Tensor:
        """Returns a part of numbers, shaped like the piece, and with its strides if dense."""
        own = self.parameter
        if self.stop is not None:
            return numbers[start : start + self.size]
        if own.is_contiguous() or is_dense(own):
            return numbers.as_strided(own.shape, own.stride(), start)
        return numbers[start : start + self.size].view(own.shape)


def flat(tensor: Tensor) -> Tensor:
    """Returns the numbers of a dense tensor in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor fills its memory without gaps or overlaps, in any order.

    Example:
        >>> import torch
        >>> is_dense(torch.ones(2, 3).t()), is_dense(torch.ones(2, 3)[:, :2])
        (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def cut(parameter: Tensor, limit: int) -> list[Piece]:
    """Returns a parameter in pieces of a limited size."""
    size = parameter.numel()
    if size <= limit:
        return [Piece(parameter)]
    return [Piece(parameter, at, min(at + limit, size)) for at in range(0, size, limit)]


def packed(pieces: Iterable[Piece], limit: int) -> list[list[Piece]]:
    """Returns pieces in buckets of a limited size; one that is larger is in a bucket of its own.

    Example:
        >>> import torch
        >>> three = [Piece(torch.ones(size)) for size in (3, 4, 9)]
        >>> [[piece.size for piece in bucket] for bucket in packed(three, 8)]
        [[3, 4], [9]]
    """
    buckets: list[list[Piece]] = []
    free = 0
    for piece in pieces:
        if not buckets or piece.size > free:
            buckets.append([])
            free = limit
        buckets[-1].append(piece)
        free -= piece.size
    return buckets


def size_of(pieces: Iterable[Piece]) -> int:
    """Returns how many numbers pieces have together."""
    return sum(piece.size for piece in pieces)
