"""Gradients of float16 parameters in float32, from unscaling them to the end of the step."""

from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._scaling._gradients import ParameterNames

# A parameter, the gradient it had, and its grad_dtype.
Widened: TypeAlias = list[tuple[Tensor, Tensor, Any]]


def widen_gradients(optimizer: Optimizer, names: ParameterNames) -> Widened:
    """Makes the gradients of float16 parameters float32, and returns what undoes it."""
    half = [
        (name, parameter)
        for name, parameter in names.of(optimizer)
        if parameter.grad is not None and parameter.grad.dtype is torch.float16
    ]
    return [_widen(name, parameter) for name, parameter in half]


def _widen(name: str, parameter: Tensor) -> tuple[Tensor, Tensor, Any]:
    gradient, before = parameter.grad, parameter.grad_dtype
    assert gradient is not None
    try:
        parameter.grad = None
        parameter.grad_dtype = torch.float32
        parameter.grad = gradient.float()
    except RuntimeError as error:
        parameter.grad = gradient
        raise UsageError(
            f"GradScaler needs float32 gradients, got float16 for {name}, which refuses a wider "
            "one. Attempting to unscale FP16 gradients would lose the small ones. Keep it in "
            "float32 with model.float(); autocast casts per operation."
        ) from error
    return parameter, gradient, before


def narrow_gradients(widened: Widened) -> None:
    """Gives parameters their own gradients back, with the values that the wide ones have now.

    Whoever else looks at them, such as the hooks of `DistributedDataParallel`, expects float16.
    """
    for parameter, gradient, before in widened:
        wide = parameter.grad
        parameter.grad = None
        parameter.grad_dtype = before
        if wide is not None:
            parameter.grad = _narrowed(wide, gradient)
    widened.clear()


def _narrowed(wide: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient in float16, in the old place if it fits there."""
    if wide.layout is not torch.strided or wide.shape != gradient.shape:
        return wide.half()
    with torch.no_grad():
        return gradient.copy_(wide)
