"""Splits float32 masters into a half-precision parameter and a remainder, and merges them back.

The bits of the master are those of the parameter, widened, plus the remainder, as integers. With
bfloat16 the remainder is simply the lower half of the master, read as a signed number; so ties are
rounded away from zero, where they would be rounded to even otherwise. Both directions run in a
compiled kernel where there is one, and give the same bits where there is none.
"""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from halfstep.torch._native._kernel import Kernel, kernel_for, takes

# From here on the nearest float16 is infinite.
_FLOAT16_OVERFLOW = 65520.0
_INT16 = torch.iinfo(torch.int16)


@torch.no_grad()
def split(master: Tensor, low: Tensor, remainder: Tensor) -> bool:
    """Splits a master, and returns whether merging gives every element back exactly.

    That is always so with bfloat16, and with float16 where an element is near enough to one.
    A NaN counts as given back, whatever its sign and payload.

    Args:
        master: The float32 values, which stay as they are.
        low: Becomes the values rounded to bfloat16 or float16.
        remainder: Becomes what they lack, in int16.

    Example:
        >>> low, remainder = torch.empty(2, dtype=torch.bfloat16), torch.empty(2).short()
        >>> split(torch.tensor([1.0, 1.001]), low, remainder)
        True
        >>> low, remainder
        (tensor([1., 1.], dtype=torch.bfloat16), tensor([   0, 8389], dtype=torch.int16))
    """
    if low.dtype is torch.float16:
        return _split_float16(master, low, remainder)
    compiled = splitting_kernel(low.numel()) if takes(low, remainder, master) else None
    if compiled is None:
        _split_bfloat16(master, low, remainder)
    else:
        compiled.split([master], [low], [remainder])
    return True


@torch.no_grad()
def merge(low: Tensor, remainder: Tensor, out: Tensor) -> None:
    """Merges what `split` made of a master.

    Where somebody else wrote a zero or an infinity to the parameter, a remainder that would make
    a NaN of it is ignored.

    Args:
        low: The parameter, in bfloat16 or float16.
        remainder: What it lacks, in int16.
        out: Becomes the float32 master.

    Example:
        >>> low, remainder = torch.ones(2).bfloat16(), torch.tensor([0, 8389]).short()
        >>> out = torch.empty(2)
        >>> merge(low, remainder, out)
        >>> out
        tensor([1.0000, 1.0010])
    """
    compiled = splitting_kernel(low.numel()) if takes(low, remainder, out) else None
    if compiled is None:
        _merge(low, remainder, out)
    else:
        compiled.merge([low], [remainder], [out])


def splitting_kernel(count: int) -> Kernel | None:
    """Returns the kernel if it is faster for so many elements, and gives the same bits."""
    found = kernel_for(count)
    return found if found and _agrees(found) else None


def _split_bfloat16(master: Tensor, low: Tensor, remainder: Tensor) -> None:
    bits = master.view(torch.int32)
    # Rounding to even goes away from zero on a tie if that is made a little more than a tie.
    above = bits >> 15
    above &= 1
    above |= bits
    low.copy_(above.view(torch.float32))
    remainder.copy_(bits)


def _split_float16(master: Tensor, low: Tensor, remainder: Tensor) -> bool:
    low.copy_(master)
    # One temporary and no more: the allocator gives larger amounts back to the system each time.
    gap = low.float().view(torch.int32)
    torch.sub(master.view(torch.int32), gap, out=gap)
    remainder.copy_(gap)
    return not gap.numel() or _is_exact(master, low, gap)


def _is_exact(master: Tensor, low: Tensor, gap: Tensor) -> bool:
    least, most = _range(master)
    if math.isfinite(least) and math.isfinite(most):
        return max(-least, most) < _FLOAT16_OVERFLOW and _fits(*_range(gap))
    fits = (gap >= _INT16.min) & (gap <= _INT16.max) & low.isfinite()
    return bool((fits | ~master.isfinite()).all())


def _range(values: Tensor) -> tuple[float, float]:
    least, most = torch.aminmax(values)
    return least.item(), most.item()


def _fits(least: float, most: float) -> bool:
    return _INT16.min <= least and most <= _INT16.max


def _merge(low: Tensor, remainder: Tensor, out: Tensor) -> None:
    out.copy_(low)
    bits = out.view(torch.int32)
    bits += remainder
    # Replacing costs more than all the rest, and sums without NaN show that there is no need to.
    # Only on a CPU can they be looked at without waiting for a device.
    if not out.is_cpu or any(math.isnan(each.sum().item()) for each in (out, low)):
        # The payload of a NaN in float16 may overflow, so that its sum is a number.
        out.copy_(torch.where(out.isnan() | low.isnan(), low, out))


@functools.cache
def _agrees(compiled: Kernel) -> bool:
    """Returns whether a kernel gives the bits of the functions above."""
    ours = _results(_split_bfloat16, _merge)
    theirs = _results(_of_one(compiled.split), _of_one(compiled.merge))
    return all(map(torch.equal, map(_comparable, ours), map(_comparable, theirs)))


def _of_one(function: Callable[..., None]) -> Callable[..., None]:
    return lambda *tensors: function(*[[each] for each in tensors])


def _results(split: Callable[..., None], merge: Callable[..., None]) -> tuple[Tensor, ...]:
    """Splits and merges every upper half with the lower halves at which something changes."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32, device="cpu")
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32, device="cpu")
    bits = upper[:, None] * 2**16 + lower
    master, tops, rest = bits.view(torch.float32), (bits >> 16).short(), bits.short()
    low, remainder, out = torch.empty_like(tops), torch.empty_like(rest), torch.empty_like(master)
    split(master, low.view(torch.bfloat16), remainder)
    merge(tops.view(torch.bfloat16), rest, out)
    return low.view(torch.bfloat16), remainder, out


def _comparable(values: Tensor) -> Tensor:
    """Returns the bits, the same ones for every NaN."""
    return values.masked_fill(values != values, 1).view(torch.int16)
