"""Norms of tensors on a CPU, in float32: the bits of PyTorch's, without waiting for each sum."""

import functools
import math

import torch
from torch import Tensor

from halfstep.torch._masters._pieces import is_dense
from halfstep.torch._native._kernel import LARGE, Kernel, kernel

# Only a sum that is not far larger than subnormal squares shows how those were rounded.
_LEAST_SUM = 2.0**-100
_DTYPES = (torch.float32, torch.bfloat16)


@torch.no_grad()
def norms_on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the norms of tensors that are all in float32 or in bfloat16.

    Example:
        >>> norms_on_cpu([torch.tensor([3.0, 4.0]).bfloat16(), torch.ones(4).bfloat16()])
        [tensor(5.), tensor(2.)]
    """
    compiled = _kernel_for(tensors)
    if compiled is None:
        return [*torch._foreach_norm(tensors, 2.0, torch.float32)]
    return _norms(compiled, [each if is_dense(each) else each.clone() for each in tensors])


def _norms(compiled: Kernel, tensors: list[Tensor]) -> list[Tensor]:
    sums = compiled.squares(tensors)
    norms = [*torch.tensor([*map(math.sqrt, sums)], dtype=torch.float32, device="cpu")]
    return [
        norm if _tells_norm(total, each.numel()) else _norm(each)
        for each, norm, total in zip(tensors, norms, sums, strict=True)
    ]


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def _tells_norm(total: float, count: int) -> bool:
    # The norm of a single number is that number, even if its square underflows.
    return _LEAST_SUM < total < math.inf or (total == 0.0 and count > 1)


def _kernel_for(tensors: list[Tensor]) -> Kernel | None:
    if max(each.numel() for each in tensors) < LARGE or not all(map(_is_plain, tensors)):
        return None
    found = kernel()
    return found if found and _adds_up_alike(found) else None


def _is_plain(values: Tensor) -> bool:
    # PyTorch goes through gaps in float32 in another order. Of bfloat16 it makes float32 without.
    ordered = values.dtype is torch.bfloat16 or is_dense(values)
    return ordered and type(values) in (Tensor, torch.nn.Parameter)


@functools.cache
def _adds_up_alike(compiled: Kernel) -> bool:
    """Returns whether a kernel adds up squares in the order in which this PyTorch does it."""
    waves = torch.arange(2**16, dtype=torch.float32, device="cpu").sin_()
    parts = [[waves.to(dtype)[left:] for left in range(16)] for dtype in _DTYPES]
    return all(all(map(torch.equal, _norms(compiled, each), map(_norm, each))) for each in parts)
