"""Makes a training script that knows nothing of halfstep visible, without changing a number.

What it does is told as events: each loss that a backward pass starts from, each optimizer step.
"""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from halfstep.core import emit, subscribe
from halfstep.torch._outermost import ends_outermost, note_steps
from halfstep.torch._patches import Shared, Undo, replace
from halfstep.torch._private import break_graphs, in_backward, never_compile
from halfstep.torch._scaling._steps import StepRecord
from halfstep.torch._telling import is_telling

_SCALER = torch.amp.GradScaler
FOUND = "torch.amp.GradScaler found inf or NaN in the gradients"


class _Local(threading.local):
    def __init__(self) -> None:
        self.scaler: Any = None  # the torch.amp.GradScaler whose step runs
        self.told = False  # whether that step was told about


_LOCAL = _Local()
# The optimizers whose steps with a scaler were told about since its last update.
_STEPPED: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()


def watch() -> Undo:
    """Tells about the losses and optimizer steps of this process, whoever wrote the loop.

    Seen are calls of `backward()` and `torch.autograd.backward`, steps of every subclass of
    `torch.optim.Optimizer`, and what a `torch.amp.GradScaler` scales and skips. Not seen are
    gradients from `torch.autograd.grad`, parameters that are changed by hand, and what runs while
    a CUDA graph is captured or inside a compiled function that calls `backward()` without a break.

    Returns:
        A function that ends it; calling it again has no effect.

    Example:
        >>> import torch
        >>> unsubscribe = subscribe(lambda event, values: print(event))
        >>> end = watch()
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.square().sum().backward()
        backward
        loss
        >>> torch.optim.SGD([weight], lr=0.1).step()
        step
        update
        >>> end()
        >>> weight.square().sum().backward()
        >>> unsubscribe()
    """
    return _WATCHING.open()


def _install() -> Iterator[Undo]:
    yield replace(torch.autograd, "backward", _backward)
    yield replace(_SCALER, "scale", _scale)
    yield replace(_SCALER, "step", _step)
    yield replace(_SCALER, "update", _update)
    yield note_steps()
    yield register_optimizer_step_post_hook(_after_step).remove
    yield subscribe(_note_steps)


_WATCHING = Shared(_install)


def _backward(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _tell_backward(args[0] if args else kwargs.get("tensors"))
    original(*args, **kwargs)


def _tell_backward(tensors: Any) -> None:
    # Within a backward pass it is a checkpoint that computes its part again.
    if in_backward() or is_capturing():
        return
    emit("backward")
    for root in _tensors(tensors):
        if root.numel() == 1:
            emit("loss", value=_plain(root), source="backward")


def _scale(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
    if scaler.is_enabled() and not is_capturing():
        for loss in _tensors(outputs):
            emit("loss", value=_plain(loss), source="scale")
    return original(scaler, outputs)


def _step(
    original: Callable[..., Any], scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> Any:
    """Tells about a step that the scaler skips: the optimizer never hears of it."""
    around, _LOCAL.scaler, _LOCAL.told = _LOCAL.scaler, scaler, False
    try:
        result = original(scaler, optimizer, *args, **kwargs)
        if scaler.is_enabled() and not _LOCAL.told and not is_telling():
            _tell(optimizer, StepRecord(skipped=True, reason=FOUND, scale=scaler.get_scale()))
    finally:
        _LOCAL.scaler = around
    return result


def _update(original: Callable[..., None], scaler: Any, *args: Any, **kwargs: Any) -> None:
    original(scaler, *args, **kwargs)
    if not torch.compiler.is_compiling():
        _tell_scale(scaler)


def _tell_scale(scaler: Any) -> None:
    """Tells what became of the scale, for those optimizers whose steps were told with it."""
    stepped = _STEPPED.pop(scaler, None)
    if stepped and not is_capturing():
        emit("scale", scale=scaler._scale, scalers=stepped)


def _note_steps(event: str, _values: dict[str, Any]) -> None:
    if event == "step":
        _LOCAL.told = True


def _after_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    # A compiled step of PyTorch's own breaks its graph anyway; another's may not be made to.
    if not torch.compiler.is_compiling():
        _tell_step(optimizer, sys._getframe(1))
    elif type(optimizer).__module__.startswith("torch.optim"):
        _tell_step(optimizer, None)


def _tell_step(optimizer: Optimizer, step: FrameType | None) -> None:
    if ends_outermost(step) and not is_telling() and not is_capturing():
        _tell(optimizer, _record(optimizer))


def _tell(optimizer: Optimizer, record: StepRecord) -> None:
    scale = getattr(_LOCAL.scaler, "_scale", None)
    emit("step", record=record)
    emit("update", scale=1.0 if scale is None else scale, scaler=id(optimizer))
    if scale is not None:
        _STEPPED.setdefault(_LOCAL.scaler, []).append(id(optimizer))


def _record(optimizer: Optimizer) -> StepRecord:
    """Returns the record of a step; a fused one alone knows whether it skips, on the device."""
    found = getattr(optimizer, "found_inf", None)
    if not isinstance(found, Tensor):
        return StepRecord()
    skipped = functools.cache(lambda: bool(found.item()))
    return StepRecord(skipped=skipped, reason=lambda: FOUND if skipped() else "")


def _tensors(values: Any) -> list[Tensor]:
    """Returns the tensors of real numbers among one or several values, iterators left alone."""
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, Tensor) and _is_readable(each)]


def _is_readable(tensor: Tensor) -> bool:
    """Returns whether there is a number that can be read without, say, asking other processes."""
    own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return own and not tensor.is_meta and tensor.is_floating_point()


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().as_subclass(Tensor)


def is_capturing() -> bool:
    """Returns whether the work goes into a CUDA graph, where nothing may be read or copied."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_CALLEES_ONLY: tuple[Callable[..., Any], ...] = (_backward, _scale, _step, _update)
_NEVER: tuple[Callable[..., Any], ...] = (_tell_backward, _tell_scale, _after_step)
for _function in _CALLEES_ONLY:
    never_compile(_function, callees=True)
for _function in _NEVER:
    never_compile(_function)
break_graphs(_tell_step)
