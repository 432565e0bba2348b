"""The masters of many pieces at once: in one call of the kernel, where it takes them."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from halfstep.torch._masters._bits import splitting_kernel
from halfstep.torch._masters._kept import kept_or_new, write
from halfstep.torch._masters._pieces import Piece, size_of


def read_all(pieces: Sequence[Piece], outs: Iterable[Tensor]) -> None:
    """Writes the exact values of pieces of parameters to tensors that lie in memory like them."""
    compiled = splitting_kernel(size_of(pieces))
    rows = []
    for piece, out in zip(pieces, outs, strict=True):
        master = kept_or_new(piece.parameter)
        if compiled and master.is_quick and master.is_known(piece.parameter):
            rows.append((piece.of(piece.parameter), piece.of(master.tensor), out))
        else:
            master.read(piece, out)
    if compiled and rows:
        compiled.merge(*zip(*rows, strict=True))


def write_all(pieces: Sequence[Piece], values: Iterable[Tensor]) -> None:
    """Gives pieces of parameters values, exactly."""
    compiled = splitting_kernel(size_of(pieces))
    rows, written = [], []
    for piece, value in zip(pieces, values, strict=True):
        master = kept_or_new(piece.parameter)
        if compiled and master.is_quick:
            rows.append((value, piece.of(piece.parameter), piece.of(master.tensor)))
            written.append((master, piece, master.is_known(piece.parameter)))
        else:
            write(piece, value)
    if compiled and rows:
        compiled.split(*zip(*rows, strict=True))
    for master, piece, known in written:
        master.is_written(piece, known=known)
