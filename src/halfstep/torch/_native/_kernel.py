"""The functions of the compiled library, for the tensors that they take.

Whatever goes wrong on the way, there is just no kernel: it changes how long something takes, and
not one bit of the result.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from halfstep.torch._masters._pieces import is_dense
from halfstep.torch._native._library import load

Function: TypeAlias = Callable[[Tensor, Tensor, Tensor], None]

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

    def split(self, master: Tensor, low: Tensor, remainder: Tensor) -> None:
        """Splits a master into a bfloat16 parameter and its remainder."""
        _call(self.library.halfstep_split, master, low, remainder)
        torch.autograd.graph.increment_version((low, remainder))

    def merge(self, low: Tensor, remainder: Tensor, out: Tensor) -> None:
        """Merges a bfloat16 parameter and its remainder into a master."""
        _call(self.library.halfstep_merge, low, remainder, out)
        torch.autograd.graph.increment_version(out)

    def squares(self, tensors: Sequence[Tensor]) -> list[float]:
        """Returns the sums of the squares of dense tensors, all in bfloat16 or all in float32."""
        places = sorted(range(len(tensors)), key=lambda place: -tensors[place].numel())
        counts = [tensors[place].numel() for place in places]
        starts = [tensors[place].data_ptr() for place in places]
        sums = (ctypes.c_float * len(places))()
        wide = tensors[0].dtype is torch.float32
        _, threads = _shared(sum(counts))
        self.library.halfstep_squares(
            (ctypes.c_void_p * len(places))(*starts),
            (ctypes.c_int64 * len(places))(*counts),
            sums,
            len(places),
            threads,
            int(wide),
        )
        found = dict(zip(places, sums, strict=True))
        return [found[place] for place in range(len(places))]


def takes(low: Tensor, remainder: Tensor, wide: Tensor) -> bool:
    """Returns whether these are plain tensors on the CPU that lie in memory alike."""
    tensors = (low, remainder, wide)
    return (
        (low.dtype, remainder.dtype, wide.dtype) == (torch.bfloat16, torch.int16, torch.float32)
        and all(type(each) in (Tensor, torch.nn.Parameter) and each.is_cpu for each in tensors)
        and all(each.layout is torch.strided for each in tensors)
        and low.shape == remainder.shape == wide.shape
        and (all(each.is_contiguous() for each in tensors) or _are_dense_alike(*tensors))
    )


def _call(function: Callable[..., None], *tensors: Tensor) -> None:
    function(*[each.data_ptr() for each in tensors], *_shared(tensors[0].numel()))


def _shared(count: int) -> tuple[int, int]:
    """Returns how many elements are shared among how many threads."""
    return count, torch.get_num_threads() if count >= LARGE else 1


def _are_dense_alike(first: Tensor, *others: Tensor) -> bool:
    return is_dense(first) and all(first.stride() == each.stride() for each in others)


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    sizes = [ctypes.c_int64, ctypes.c_int64]
    library.halfstep_threads.restype = ctypes.c_int64
    for function in (library.halfstep_split, library.halfstep_merge):
        function.argtypes, function.restype = [*[ctypes.c_void_p] * 3, *sizes], None
    squares = library.halfstep_squares
    squares.argtypes, squares.restype = [*[ctypes.c_void_p] * 3, *sizes, ctypes.c_int], None
    return library
