"""Gradients that are applied within backward, which no scaled loss may lead to."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import UsageError
from halfstep.torch._patches import Shared, Undo, replace
from halfstep.torch._private import backward_pass

# What applies gradients within backward.
released: "weakref.WeakSet[Any]" = weakref.WeakSet()
# The latest backward passes that began from a scaled loss.
_scaled: list[int] = []
_KEPT = 64


def note_scaled(outputs: Tensor) -> None:
    """Lets backward passes from scaled outputs be known as such."""
    if released and outputs.requires_grad:
        outputs.register_hook(_note)


def _note(_gradient: Tensor) -> None:
    _scaled[:] = [*_scaled[-_KEPT:], backward_pass()]


def watch_scalers() -> Undo:
    """Lets what PyTorch's scalers scale be known as well, until it is undone."""
    return _scalers.open()


def _watch() -> Iterator[Undo]:
    yield replace(torch.amp.GradScaler, "scale", _scaled_by)


_scalers = Shared(_watch)


def _scaled_by(scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    found = scale(scaler, outputs)
    if scaler.is_enabled():
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, Tensor):
                note_scaled(each)
    return found


class Findings:
    """Whether a gradient of a backward pass was not finite, which a device may know alone."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._now: Tensor | None = None

    def add(self, found: Tensor) -> Tensor:
        """Returns what was found together with all that had been found before."""
        self._before = self._now
        if self._before is not None:
            found = found + self._before.to(found.device)
        self._now = found
        return found

    def were_bad(self) -> bool:
        """Returns whether anything had been found before the latest; reads the device."""
        return self._before is not None and bool(self._before.item())


_latest: tuple[int, Findings] = -1, Findings()


def findings_of(number: int) -> Findings:
    """Returns what a backward pass has found up to now."""
    global _latest
    if _latest[0] != number:
        _latest = number, Findings()
    return _latest[1]


def refuse_scaled() -> None:
    """Raises an error if the gradients of the present backward pass are scaled."""
    if backward_pass() in _scaled:
        raise UsageError(
            "GradScaler needs gradients that wait for step(), got a region with release=True: it "
            "would apply them while they are scaled, and before it is known that none overflows. "
            "Leave the scaler out, as a region scales by itself, or use release=False."
        )
