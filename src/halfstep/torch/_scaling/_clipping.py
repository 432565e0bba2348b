"""Notices when gradients are clipped while they are still multiplied by the loss scale.

PyTorch's clipping functions look their inner functions up in their own module, so wrapping those
covers every way of importing the outer ones. Where a PyTorch lacks the inner names nothing is
wrapped, and nothing is noticed.
"""

import functools
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils.weak import TensorWeakRef

from halfstep.errors import ScalerStateError
from halfstep.torch._scaling._gradients import fingerprint


class Clipped:
    """One call that clipped gradients, remembered by identity so that none is kept alive."""

    __slots__ = ("_first", "_ids", "function")

    def __init__(self, function: str, gradients: list[Tensor], ids: list[int]) -> None:
        self.function = function
        self._first = TensorWeakRef(gradients[0])
        self._ids = ids

    def covers(self, gradients: list[Tensor]) -> bool:
        """Returns whether one of these gradients was clipped."""
        return self._first() is not None and not set(self._ids).isdisjoint(map(id, gradients))


class _Watching(Protocol):
    _clip_watch: bool
    _clipped_finite: tuple[list[int], list[int]] | None
    _clips: deque[Clipped]


_watching: "weakref.WeakSet[Any]" = weakref.WeakSet()
_latest = threading.local()


def watch(scaler: _Watching) -> None:
    """Tells a scaler from now on when gradients are clipped while its scale is in them."""
    install()
    _watching.add(scaler)


def refuse_clipped(clips: Iterable[Clipped], gradients: list[Tensor]) -> None:
    """Raises an error if gradients that are about to be unscaled have been clipped before."""
    for clip in clips:
        if clip.covers(gradients):
            raise ScalerStateError(
                f"GradScaler needs unscaled gradients for clipping, got {clip.function}() on "
                "gradients that are still multiplied by the loss scale. Call "
                f"scaler.unscale_(optimizer) before {clip.function}()."
            )


def _note(function: str, gradients: list[Tensor], ids: list[int]) -> None:
    for scaler in list(_watching) if gradients else ():
        if scaler._clip_watch:
            scaler._clips.append(Clipped(function, gradients, ids))


def note_clipping(function: str, gradients: list[Tensor]) -> None:
    """Tells scalers that gradients are clipped by a function that is not PyTorch's."""
    _note(function, gradients, [*map(id, gradients)])


@functools.cache
def install() -> None:
    """Wraps the inner functions of PyTorch's clipping, once per process."""
    for name, wrap in (
        ("_get_total_norm", _wrap_norm),
        ("_clip_grads_with_norm_", _wrap_clip),
        ("_group_tensors_by_device_and_dtype", _wrap_grouping),
    ):
        inner = getattr(clip_grad, name, None)
        if inner is not None:
            setattr(clip_grad, name, wrap(inner))
            if getattr(torch.nn.utils, name[1:], None) is inner:
                setattr(torch.nn.utils, name[1:], getattr(clip_grad, name))


def _wrap_norm(inner: Callable[..., Any]) -> Callable[..., Any]:
    code = _code_of(clip_grad.clip_grad_norm_)

    @functools.wraps(inner)
    def norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _watching or sys._getframe(1).f_code is not code:
            return inner(tensors, *args, **kwargs)
        total_norm = inner(tensors, *args, **kwargs)
        if args and float(args[0]) >= 1.0:
            # Other norms may be finite although an entry is not.
            _latest.norm = total_norm
        return total_norm

    return norm


def _wrap_clip(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _watching:
            return inner(parameters, max_norm, total_norm, *args, **kwargs)
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        result = inner(parameters, max_norm, total_norm, *args, **kwargs)
        # Only between the two halves of clip_grad_norm_ can nobody have changed a gradient.
        sure = _latest.__dict__.pop("norm", None) is total_norm
        _look_at(parameters, float(max_norm), total_norm if sure else None)
        return result

    return clip


def _look_at(parameters: list[Tensor], max_norm: float, norm: Tensor | None) -> None:
    """Notes gradients that were just clipped, and whether all of them must be finite."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    seen = fingerprint(gradients)
    # With an infinite limit people only ask for the norm.
    if max_norm != math.inf:
        _note("clip_grad_norm_", gradients, seen[0])
    if type(norm) is Tensor and norm.is_cpu and max_norm >= 0.0 and math.isfinite(norm.item()):
        # The norm was finite, so every gradient was, and clipping only shrinks them.
        for scaler in list(_watching):
            scaler._clipped_finite = seen


def _code_of(function: Any) -> Any:
    return getattr(function, "__wrapped__", function).__code__


def _wrap_grouping(inner: Callable[..., Any]) -> Callable[..., Any]:
    code = _code_of(clip_grad.clip_grad_value_)

    @functools.wraps(inner)
    def group(lists: list[list[Tensor]], *args: Any, **kwargs: Any) -> Any:
        # First of all, because the collector may empty the set while a graph is traced.
        if torch.compiler.is_compiling():
            return inner(lists, *args, **kwargs)
        if _watching and sys._getframe(1).f_code is code:
            _note("clip_grad_value_", lists[0], [*map(id, lists[0])])
        return inner(lists, *args, **kwargs)

    return group
