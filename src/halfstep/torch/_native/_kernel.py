"""The functions of the compiled library, for the tensors that they take.

Whatever goes wrong on the way, there is just no kernel: it changes how long something takes, and
not one bit of the result.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep.torch._masters._pieces import is_dense
from halfstep.torch._native._library import load

Tensors: TypeAlias = Sequence[Tensor]

_WIDE = torch.float32
# Smaller tensors are done by one thread, and do not lead to a kernel being built.
LARGE = 2**15
# One thread of the kernel is as fast as this many of PyTorch's operations.
_WORTH_THREADS = 4


@functools.cache
def kernel() -> "Kernel | None":
    """Returns the kernel, built when it is wanted for the first time, None where there is none."""
    library = load()
    return None if library is None else Kernel(_declared(library))


@dataclass(frozen=True)
class Kernel:
    """The functions of a loaded library, for tensors that `takes` accepts."""

    library: ctypes.CDLL

    @functools.cached_property
    def is_threaded(self) -> bool:
        """Whether the library can use the threads of PyTorch."""
        return bool(self.library.halfstep_threads(ctypes.c_int64(1)))

    def is_worthwhile(self, count: int) -> bool:
        """Returns whether so many elements are done faster than by PyTorch's operations."""
        return self.is_threaded or count < LARGE or torch.get_num_threads() <= _WORTH_THREADS

    def split(self, masters: Tensors, lows: Tensors, remainders: Tensors) -> None:
        """Splits masters into bfloat16 parameters and their remainders."""
        _call(self.library.halfstep_split, masters, lows, remainders)
        torch.autograd.graph.increment_version((*lows, *remainders))

    def merge(self, lows: Tensors, remainders: Tensors, outs: Tensors) -> None:
        """Merges bfloat16 parameters and their remainders into masters."""
        _call(self.library.halfstep_merge, lows, remainders, outs)
        torch.autograd.graph.increment_version(outs)

    def squares(self, tensors: Tensors) -> list[float]:
        """Returns the sums of the squares of dense tensors, all in bfloat16 or all in float32."""
        places = sorted(range(len(tensors)), key=lambda place: -tensors[place].numel())
        sums = (ctypes.c_float * len(places))()
        ordered = [tensors[place] for place in places]
        _call(self.library.halfstep_squares, ordered, last=(sums, tensors[0].dtype is _WIDE))
        found = dict(zip(places, sums, strict=True))
        return [found[place] for place in range(len(places))]

    def exponents(self, numbers: Tensor, row: Tensor) -> None:
        """Adds contiguous numbers, in bfloat16 or float32, to a row of counts, in one thread."""
        wide = numbers.dtype is _WIDE
        self.library.halfstep_exponents(numbers.data_ptr(), numbers.numel(), row.data_ptr(), wide)


def takes(low: Tensor, remainder: Tensor, wide: Tensor) -> bool:
    """Returns whether these are plain tensors on the CPU that lie in memory alike."""
    alike = _is_plain(wide, torch.float32) and _lie_alike(low, wide)
    return alike and takes_kept(low, remainder)


def takes_kept(low: Tensor, remainder: Tensor) -> bool:
    """Returns whether these are so, for a wide one that lies in memory like them."""
    plain = _is_plain(low, torch.bfloat16) and _is_plain(remainder, torch.int16)
    return plain and _lie_alike(low, remainder) and is_dense(low)


def _lie_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.stride() == other.stride()


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    plain = tensor.dtype is dtype and type(tensor) in (Tensor, torch.nn.Parameter)
    return plain and tensor.is_cpu and tensor.layout is torch.strided


def kernel_at_hand(count: int) -> Kernel | None:
    """Returns the kernel, which is built for the first many elements, for work of one thread."""
    return None if count < LARGE and not kernel.cache_info().currsize else kernel()


def kernel_for(count: int) -> Kernel | None:
    """Returns the kernel if it is faster for so many elements; it is built for the first many."""
    found = kernel_at_hand(count)
    return found if found and found.is_worthwhile(count) else None


def _call(function: Callable[..., None], *columns: Tensors, last: Sequence[Any] = ()) -> None:
    counts = [each.numel() for each in columns[0]]
    pointers = ctypes.c_void_p * len(counts)
    starts = [pointers(*[each.data_ptr() for each in column]) for column in columns]
    threads = torch.get_num_threads() if sum(counts) >= LARGE else 1
    function(*starts, (ctypes.c_int64 * len(counts))(*counts), len(counts), threads, *last)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.halfstep_threads.restype = ctypes.c_int64
    pointer: Any = ctypes.c_void_p
    sizes: list[Any] = [ctypes.c_int64, ctypes.c_int64]
    for function in (library.halfstep_split, library.halfstep_merge):
        function.argtypes, function.restype = [*[pointer] * 4, *sizes], None
    squares = library.halfstep_squares
    squares.argtypes, squares.restype = [pointer, pointer, *sizes, pointer, ctypes.c_int], None
    exponents = library.halfstep_exponents
    exponents.argtypes, exponents.restype = [pointer, sizes[0], pointer, ctypes.c_int], None
    return library
