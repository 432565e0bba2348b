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

from halfstep.core import LossScale, ScaleState
from halfstep.torch import _private
from halfstep.torch._scaling._gradients import by_kind, unscale
from halfstep.torch._scaling._scale_cell import next_on_device
from halfstep.torch._tracing import is_tracing

# On one device: scale, finite passes in a row, overflows; whether, in the latest pass, a gradient
# that left was not finite, and whether one that entered was not; how many passes before had one.
Cells = list[Tensor]

# By what gradients are multiplied going in and coming out, None for not at all.
Factors: TypeAlias = tuple[Tensor | None, Tensor | None]

_EXPONENT = 0x7F800000
# The count of finite passes begins below zero. Until it gets there the scale is looked for in
# leaps, so that a model whose gradients grow a lot loses few steps.
_FIRST_PASSES = 16
_LEAP = 4
# Beyond these, the reciprocal of a scale would not be exact any more.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


def fresh(state: ScaleState, device: torch.device) -> Cells:
    """Returns the cells of a state, before any pass."""
    # One more, for the pass before the first, which is counted with it.
    steps = -_FIRST_PASSES - 1
    numbers = (state.scale, steps, state.overflows, 0.0, 0.0, 0.0)
    dtypes = (torch.float32, torch.int32, torch.int32, *[torch.float32] * 3)
    return [
        torch.full((), number, dtype=dtype, device=device)
        for number, dtype in zip(numbers, dtypes, strict=True)
    ]


def choose(cells: Cells, rule: str, gradients: Sequence[Tensor], factor: Tensor | None) -> Factors:
    """Moves the scale on by what the pass before did, and returns the factor and its inverse."""
    if any(map(_private.is_old_batch, gradients)):
        return None, None
    with torch.no_grad():
        size = _size(gradients, cells[0].device)
        size = size if factor is None else size * factor.abs()
        if _private.in_transform():
            return _on_device(cells[0], size)
        if cells[0].is_cpu and not is_tracing():
            return _on_host(cells, parsed(rule), size.item())
        _advance(cells, parsed(rule), size)
        return _on_device(cells[0], size)


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
    around = 2 * _power_of_two(size).clamp(_SMALLEST, _LARGEST)
    scale = _power_of_two(scale)
    return scale / around, around / scale


def _power_of_two(number: Tensor) -> Tensor:
    """Returns the largest power of two that is not larger, inf for what is not finite."""
    return (number.view(torch.int32) & _EXPONENT).view(torch.float32)


def _on_host(cells: Cells, rule: LossScale, size: float) -> tuple[Tensor, Tensor]:
    """Does all of it in Python, where a number costs less than a tensor."""
    if rule.kind == "dynamic":
        for cell, before, after in zip(cells, _numbers(cells), settled(cells, rule), strict=False):
            if before != after:
                cell.fill_(after)
    if cells[3].item():
        cells[5].add_(cells[3])
        cells[3].zero_()
    cells[4].fill_(not math.isfinite(size))
    around = 2 * min(max(_floor(size), _SMALLEST), _LARGEST)
    scale = _floor(cells[0].item())
    return torch.tensor(scale / around), torch.tensor(around / scale)


def _floor(number: float) -> float:
    """Does what `_power_of_two` does."""
    return math.ldexp(0.5, math.frexp(number)[1]) if math.isfinite(number) else math.inf


@functools.lru_cache(maxsize=64)
def parsed(rule: str) -> LossScale:
    """Returns the rule of a text."""
    return LossScale.parse(rule)


def _advance(cells: Cells, rule: LossScale, size: Tensor) -> None:
    """Counts the pass that ended, and begins one with gradients of a size."""
    if rule.kind == "dynamic":
        for cell, value in zip(cells, _next_on_device(cells, rule), strict=False):
            cell.copy_(value)
    cells[5].add_(cells[3])
    cells[3].zero_()
    cells[4].copy_(~size.isfinite())


def _numbers(cells: Cells) -> list[float]:
    return [cell.item() for cell in cells]


def settled(cells: Cells, rule: LossScale) -> ScaleState:
    """Returns the state after the pass that ended; reads the device.

    A gradient that was not finite when it entered says nothing about the scale.
    """
    scale, steps, overflows, found, foreign, _ = _numbers(cells)
    state, finite = ScaleState(scale, int(steps), int(overflows)), found <= foreign
    if steps >= 0:
        return rule.next(state, finite=finite)
    if finite:
        return state._replace(finite_steps=state.finite_steps + 1)
    lowered = max(scale * rule.backoff_factor**_LEAP, min(rule.min_scale, scale))
    return state._replace(scale=lowered, finite_steps=-_FIRST_PASSES)


def _next_on_device(cells: Cells, rule: LossScale) -> tuple[Tensor, ...]:
    """Returns what `settled` does, without waiting for the device."""
    scale, steps, overflows, found, foreign, _ = cells
    bad, first = found > foreign, steps < 0
    usual = next_on_device(rule, (scale, steps.clamp(min=0), overflows), bad)
    lowered = torch.maximum(scale * rule.backoff_factor**_LEAP, scale.clamp(max=rule.min_scale))
    return (
        torch.where(first, torch.where(bad, lowered, scale), usual[0]),
        torch.where(first, torch.where(bad, -_FIRST_PASSES, steps + 1), usual[1]),
        torch.where(first, overflows, usual[2]),
    )


def overflowed(cells: Cells) -> bool:
    """Returns whether the pass that ended overflowed inside the region; reads the device."""
    return cells[3].item() > cells[4].item()


def faults(cells: Cells) -> float | Tensor:
    """Returns in how many passes a gradient that left was not finite; a tensor on a device."""
    if cells[3].is_cpu:
        return cells[3].item() + cells[5].item()
    return cells[3] + cells[5]


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


def check(gradients: Sequence[Tensor], cells: Cells) -> None:
    """Notes whether a gradient that left the region is not finite."""
    if _private.in_transform():
        return
    found = cells[3]
    one = torch.ones((), dtype=torch.float32, device=found.device)
    kinds = by_kind(list(gradients))
    for other in unscale(kinds, one, found, again=False).values():
        if other is not found:
            found.copy_(torch.maximum(found, other.to(found.device, non_blocking=True)))


def product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Returns the product of two factors, None standing for 1."""
    if one is None or other is None:
        return other if one is None else one
    return one * other
