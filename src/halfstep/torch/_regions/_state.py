"""The state of a region's scale, which moves on with each backward pass."""

from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.core import LossScale, ScaleState
from halfstep.torch._scaling._scale_cell import next_on_device

# So many finite passes make a scale a proven one. Until then an overflow lowers it in a leap, so
# that a model whose gradients grow a lot loses few steps.
PROVEN = 16
_LEAP = 4


class Cells(NamedTuple):
    """The state as tensors without dimensions, on the device of the model.

    Args:
        scale: What the sum of the magnitudes of gradients that enter is brought to.
        finite_steps: Finite passes in a row since the scale last changed.
        overflows: Overflows since the last growth, counted up to the hysteresis.
        proof: Finite passes since the last leap, counted up to `PROVEN`.
        found: 1.0 where a gradient that left in the latest pass was not finite.
        foreign: 1.0 where one that entered in it was not.
        faults: How often gradients that left and were added to others were not finite.
    """

    scale: Tensor
    finite_steps: Tensor
    overflows: Tensor
    proof: Tensor
    found: Tensor
    foreign: Tensor
    faults: Tensor


_DTYPES = (torch.float32, *[torch.int32] * 3, *[torch.float32] * 3)


class Settled(NamedTuple):
    """The part of the state that the rule moves, as numbers."""

    scale: float
    finite_steps: int
    overflows: int
    proof: int


def fresh(state: ScaleState, device: torch.device) -> Cells:
    """Returns the cells of a state, before any pass."""
    # The first pass counts the one before it, which never was.
    numbers = (state.scale, -1, state.overflows, -1, 0.0, 0.0, 0.0)
    pairs = zip(numbers, _DTYPES, strict=True)
    return Cells(*[torch.full((), value, dtype=dtype, device=device) for value, dtype in pairs])


def settled(cells: Cells, rule: LossScale) -> Settled:
    """Returns the state after the pass that ended; reads the device."""
    return _after(numbers(cells), rule)


def _after(ended: list[float], rule: LossScale) -> Settled:
    # A gradient that was not finite when it entered says nothing about the scale.
    scale, steps, overflows, proof, found, foreign, _ = ended
    finite = found <= foreign
    if finite or proof >= PROVEN:
        after = rule.next(ScaleState(scale, int(steps), int(overflows)), finite=finite)
        return Settled(*after, int(min(proof + finite, PROVEN)))
    lowered = max(scale * rule.backoff_factor**_LEAP, min(rule.min_scale, scale))
    return Settled(lowered, 0, int(overflows), 0)


def settled_on_device(cells: Cells, rule: LossScale) -> tuple[Tensor, ...]:
    """Returns what `settled` does as tensors, without waiting for the device."""
    scale, steps, overflows, proof, found, foreign, _ = cells
    bad = found > foreign
    leaps = bad & (proof < PROVEN)
    usual = next_on_device(rule, (scale, steps, overflows), bad)
    lowered = torch.maximum(scale * rule.backoff_factor**_LEAP, scale.clamp(max=rule.min_scale))
    return (
        torch.where(leaps, lowered, usual[0]),
        torch.where(leaps, 0, usual[1]),
        torch.where(leaps, overflows, usual[2]),
        torch.where(leaps, 0, (proof + ~bad).clamp(max=PROVEN)),
    )


def begin_pass(cells: Cells, rule: LossScale, size: float) -> None:
    """Counts the pass that ended, and begins one; in Python, where a number costs less."""
    if rule.kind == "dynamic":
        ended = numbers(cells)
        for cell, before, after in zip(cells, ended, _after(ended, rule), strict=False):
            if before != after:
                cell.fill_(after)
    if cells.found.item():
        cells.found.zero_()
    cells.foreign.fill_(size - size != 0)


def begin_pass_on_device(cells: Cells, rule: LossScale, size: Tensor) -> None:
    """Does what `begin_pass` does, without waiting for the device."""
    if rule.kind == "dynamic":
        for cell, value in zip(cells, settled_on_device(cells, rule), strict=False):
            cell.copy_(value)
    cells.found.zero_()
    cells.foreign.copy_(~size.isfinite())


def numbers(cells: Cells) -> list[float]:
    """Returns what the cells hold; reads the device."""
    return [cell.item() for cell in cells]


def overflowed(cells: Cells) -> bool:
    """Returns whether the pass that ended overflowed inside the region; reads the device."""
    return cells.found.item() > cells.foreign.item()


def faults(cells: Cells) -> float | Tensor:
    """Returns how often gradients that left were not finite; a tensor where it is on a device."""
    return cells.faults.item() if cells.faults.is_cpu else cells.faults.clone()
