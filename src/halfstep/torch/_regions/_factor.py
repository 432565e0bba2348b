"""The factor by which gradients are scaled inside a region, chosen by what arrives.

The sum of the magnitudes of the gradients that enter is brought just below the scale of the region,
by a power of two, so that scaling is exact. For a loss that enters by itself this is what a classic
loss scale does; for outputs of a loss that is a mean it is so too, whatever the loss was
multiplied by. And no sum of what entered, such as the gradient of a bias, can be larger.
"""

import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from halfstep.core import LossScale
from halfstep.torch import _private
from halfstep.torch._regions._state import Cells, begin_pass, begin_pass_on_device
from halfstep.torch._scaling._gradients import by_kind, unscale
from halfstep.torch._scaling._iteration import total
from halfstep.torch._tracing import is_tracing

# By what gradients are multiplied going in and coming out, None for not at all.
Factors: TypeAlias = tuple[Tensor | None, Tensor | None]

_EXPONENT = 0x7F800000
# Beyond these, the reciprocal of a scale would not be exact any more.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


def choose(cells: Cells, rule: str, gradients: Sequence[Tensor], factor: Tensor | None) -> Factors:
    """Moves the scale on by what the pass before did, and returns the factor and its inverse."""
    if any(map(_private.is_old_batch, gradients)):
        return None, None
    with torch.no_grad():
        size = _size(gradients, cells.scale.device)
        size = size if factor is None else size * factor.abs()
        if cells.scale.is_cpu and not (_private.in_transform() or is_tracing()):
            number = size.item()
            begin_pass(cells, _parsed(rule), number)
            return _on_host(cells.scale.item(), number)
        if not _private.in_transform():
            begin_pass_on_device(cells, _parsed(rule), size)
        return _on_device(cells.scale, size)


def _size(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of all magnitudes."""
    sizes = [_norm(_private.unwrapped(each).detach(), device) for each in gradients if each.numel()]
    if len(sizes) == 1:
        return sizes[0]
    return torch.stack(sizes).sum() if sizes else torch.zeros((), device=device)


def _norm(gradient: Tensor, device: torch.device) -> Tensor:
    values = gradient if gradient.layout is torch.strided else gradient.coalesce().values()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    wide = torch.promote_types(values.dtype, torch.float32)
    norm = torch.linalg.vector_norm(values, 1, dtype=wide)
    return norm.to(device, torch.float32, non_blocking=True)


def _on_device(scale: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    # Where nothing but zeros enters, what enters later in the pass should find a usual factor.
    power = torch.where(size == 0, 0.5, _power_of_two(size))
    around = 2 * power.clamp(_SMALLEST, _LARGEST)
    scale = _power_of_two(scale)
    return scale / around, around / scale


def _power_of_two(number: Tensor) -> Tensor:
    """Returns the largest power of two that is not larger, inf for what is not finite."""
    return (number.view(torch.int32) & _EXPONENT).view(torch.float32)


def _on_host(scale: float, size: float) -> tuple[Tensor, Tensor]:
    """Does what `_on_device` does, in Python."""
    around = 2 * min(max(_floor(size), _SMALLEST), _LARGEST)
    scale = _floor(scale)
    return torch.tensor(scale / around), torch.tensor(around / scale)


def _floor(number: float) -> float:
    """Does what `_power_of_two` does."""
    return math.ldexp(0.5, math.frexp(number)[1]) if math.isfinite(number) else math.inf


@functools.lru_cache(maxsize=64)
def _parsed(rule: str) -> LossScale:
    """Returns the rule of a text."""
    return LossScale.parse(rule)


def scaled(tensors: Sequence[Tensor], factor: Tensor | None) -> tuple[Tensor, ...]:
    """Returns tensors times a factor, or the same values under new names."""
    if factor is None:
        return tuple(each.detach() for each in tensors)
    if _private.in_transform() or not _are_alike(tensors, factor):
        return tuple(each * factor.to(each.device, non_blocking=True) for each in tensors)
    return tuple(torch._foreach_mul(list(tensors), factor))


def _are_alike(tensors: Sequence[Tensor], factor: Tensor) -> bool:
    """Returns whether the kernels that take many tensors at once can take these."""
    device = factor.device
    return all(each.layout is torch.strided and each.device == device for each in tensors)


def check(gradients: Sequence[Tensor], cells: Cells, *, counts: bool) -> None:
    """Notes whether a gradient that left the region is not finite.

    Args:
        gradients: What left.
        cells: Where it is noted.
        counts: Whether an optimizer is going to find it.
    """
    if _private.in_transform():
        return
    found = _found(gradients, cells.found.device)
    if found.is_cpu and not is_tracing() and not found.item():
        return
    cells.found.copy_(torch.maximum(cells.found, found))
    if counts:
        cells.faults.add_(found)


def _found(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns 1.0 where one is not finite, else 0.0."""
    one = _one(device)
    found = torch.zeros_like(one)
    if all(each.dtype is torch.float32 for each in gradients) and _are_alike(gradients, one):
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, one)
        return found
    return total([*unscale(by_kind(list(gradients)), one, found, again=False).values()], device)


def _one(device: torch.device) -> Tensor:
    if is_tracing():
        return torch.ones((), dtype=torch.float32, device=device)
    return _kept_one(device)


@functools.lru_cache(maxsize=16)
def _kept_one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Returns the product of two factors, None standing for 1."""
    if one is None or other is None:
        return other if one is None else one
    return one * other
