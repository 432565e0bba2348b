"""Multiplies what the user hands to `GradScaler.scale`, and notes whether it was finite."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import UsageError

# The gradient that flows into a float16 tensor is float16 and has to hold the scale itself.
LARGEST_FOR_HALF = 2.0**15
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}


def widened(tensor: Tensor) -> Tensor:
    """Returns half-precision tensors in float32, everything else as it is."""
    wider = _WIDER.get(tensor.dtype)
    return tensor if wider is None else tensor.to(wider)


def map_outputs(outputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Applies a function to every tensor, keeping lists and tuples and staying lazy for others.

    Example:
        >>> map_outputs([torch.ones(()), (torch.ones(()),)], lambda tensor: tensor * 2)
        [tensor(2.), (tensor(2.),)]
    """
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, (list, tuple)):
        items = [map_outputs(item, function) for item in outputs]
        return type(outputs)(*items) if hasattr(outputs, "_fields") else type(outputs)(items)
    if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes, Mapping)):
        return (map_outputs(item, function) for item in outputs)
    raise UsageError(
        f"outputs must be a Tensor or an iterable of Tensors, got {type(outputs).__name__}. "
        "Pass the loss, or a list of losses."
    )


def holds_half(outputs: Any) -> bool:
    """Returns whether a tensor, or one in a list or tuple, is float16."""
    if isinstance(outputs, (list, tuple)):
        return any(map(holds_half, outputs))
    return isinstance(outputs, Tensor) and outputs.dtype is torch.float16


class LossWatch:
    """Knows whether the losses scaled since the last update were finite, without a device sync.

    With one optimizer any bad loss explains bad gradients; with several, only if all were bad is
    it sure that none of the gradients overflowed.

    Example:
        >>> watch = LossWatch()
        >>> watch.note(torch.tensor(2.0))
        >>> watch.note(torch.tensor(torch.nan))
        >>> watch.nonfinite()
        True
        >>> watch.shared = True
        >>> watch.nonfinite()
        False
    """

    __slots__ = ("_bad", "_good", "_lent", "_notes", "shared")

    def __init__(self) -> None:
        self._bad = self._good = self._lent = False
        self._notes: list[Tensor] = []
        self.shared = False

    def renewed(self) -> "LossWatch":
        """Returns a watch for the next iteration."""
        if self._bad or self._notes or self._lent:
            # A new one, because records of steps may still ask this one.
            return LossWatch()
        self._good = self.shared = False
        return self

    def note(self, outputs: Tensor) -> None:
        """Looks at unscaled outputs: at once on the CPU, later if they are elsewhere."""
        if outputs.is_cpu and outputs.numel() == 1:
            self._count(not _is_finite(outputs))
        else:
            # Zero where finite, NaN elsewhere: one number per output, whatever its size.
            self._notes.append((outputs.detach() * 0).sum())

    def _count(self, bad: bool) -> None:
        self._bad, self._good = self._bad or bad, self._good or not bad

    def nonfinite(self) -> bool:
        """Returns whether losses that were not finite explain it, and may wait for a device."""
        while self._notes:
            self._count(bool(self._notes.pop().isnan()))
        return self._bad and not (self.shared and self._good)

    def lazily(self) -> bool | Callable[[], bool]:
        """Returns the answer, or what to call where it is not known for sure yet."""
        if not (self._notes or self._bad):
            return False
        self._lent = True
        # Once asked, it stays: a reason and a flag that are read one after the other must agree.
        return functools.cache(self.nonfinite)

    def on_device(self, device: torch.device) -> Tensor | None:
        """Returns the answer as a tensor, or None if it is no for sure."""
        if self._good if self.shared else self._bad:
            return None if self.shared else torch.ones((), dtype=torch.bool, device=device)
        notes = [note.isnan().to(device, non_blocking=True) for note in self._notes]
        if notes:
            return torch.stack(notes).all() if self.shared else torch.stack(notes).any()
        return torch.ones((), dtype=torch.bool, device=device) if self._bad else None


def _is_finite(outputs: Tensor) -> bool:
    try:
        return bool(outputs.item() * 0 == 0)
    except RuntimeError:
        # Inside torch.func transforms a tensor has no value yet. The gradients get checked anyway.
        return True
