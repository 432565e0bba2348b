"""Gradients that are applied within backward, which are neither to be scaled nor to be clipped.

PyTorch keeps its clipping functions in others that turn gradients off. What is changed is what
those call, so that it does not matter how and when a name was imported.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import UsageError
from halfstep.torch._patches import Shared, Undo, replace
from halfstep.torch._private import backward_pass

# What applies gradients within backward.
released: "weakref.WeakSet[Any]" = weakref.WeakSet()
# The latest backward passes that began from a scaled loss.
_scaled: list[int] = []
_KEPT = 64
_CLIPS = ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_")


def note_scaled(outputs: Tensor) -> None:
    """Lets backward passes from scaled outputs be known as such."""
    if released and outputs.requires_grad:
        outputs.register_hook(_note)


def _note(_gradient: Tensor) -> None:
    _scaled[:] = [*_scaled[-_KEPT:], backward_pass()]


def watch() -> Undo:
    """Lets what PyTorch scales and clips be known as well, until it is undone."""
    return _watching.open()


def _watch() -> Iterator[Undo]:
    yield replace(torch.amp.GradScaler, "scale", _scaled_by)
    for name in _CLIPS:
        yield replace(*_place_of(name), functools.partial(_clipped_by, name))


_watching = Shared(_watch)


def _scaled_by(scale: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    found = scale(scaler, outputs)
    if scaler.is_enabled():
        for each in found if isinstance(found, list | tuple) else [found]:
            if isinstance(each, Tensor):
                note_scaled(each)
    return found


def _place_of(name: str) -> tuple[Any, str]:
    """Returns what holds a clipping function, and under which name."""
    outer = inspect.unwrap(getattr(nn.utils, name), stop=lambda each: "func" in _closed(each))
    inner = _closed(outer).get("func")
    return (nn.utils, name) if inner is None else (inner, "cell_contents")


def _closed(function: Any) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    return dict(zip(code.co_freevars, cells, strict=True)) if code and cells else {}


def _clipped_by(
    name: str, clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any
) -> Any:
    if torch.compiler.is_compiling():
        return clip(parameters, *args, **kwargs)
    found = [parameters] if isinstance(parameters, Tensor) else [*parameters]
    refuse_clipped(f"{name}()", found)
    # PyTorch warns of a generator that is empty.
    return clip(found or parameters, *args, **kwargs)


def refuse_clipped(name: str, parameters: Iterable[Tensor]) -> None:
    """Raises an error if gradients of one of the parameters are applied within backward."""
    live = list(released)
    asked = {id(each) for each in parameters} if live else set()
    if any(not asked.isdisjoint(map(id, each.parameters())) for each in live):
        raise UsageError(
            f"{name} needs all gradients at once, got parameters of regions with release=True, "
            "which free theirs within backward. Clip without release, or leave clipping out."
        )


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
