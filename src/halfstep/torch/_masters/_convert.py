"""Makes parameters half-precision ones with a master, and float32 ones again."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from halfstep.errors import UsageError
from halfstep.torch._masters._kept import (
    HALF,
    keep,
    kept_or_new,
    master_of,
    set_grad_dtype,
    true_value,
    write,
)
from halfstep.torch._masters._pieces import Piece


def splittable(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the trained parameters in float32 or less of modules, each once.

    Parameters beside running statistics are left out: kernels need both in the same dtype, and
    statistics must stay in float32.
    """
    found: dict[int, Tensor] = {}
    for module in modules:
        statistics = {each.shape for each in _statistics(module)}
        for parameter in module.parameters(recurse=False):
            _refuse_lazy(parameter, module)
            kinds = (torch.float32, *HALF)
            if parameter.requires_grad and parameter.dtype in kinds:
                found.setdefault(id(parameter), parameter)
                if parameter.shape in statistics:
                    del found[id(parameter)]
    return list(found.values())


def _refuse_lazy(parameter: Tensor, module: nn.Module) -> None:
    if isinstance(parameter, UninitializedTensorMixin):
        raise UsageError(
            f"masters='split' needs parameters that have values, got a {type(module).__name__} "
            "that waits for its first input. Call the model once before prepare."
        )


def _statistics(module: nn.Module) -> Iterator[Tensor]:
    return (each for each in module.buffers(recurse=False) if each.dtype is torch.float32)


def to_half(parameter: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    """Makes a parameter a half-precision one with an exact master.

    Args:
        parameter: A parameter in float32, or one in half precision, which keeps its dtype.
        dtype: What a float32 parameter becomes.
        grad_dtype: What its gradient is kept in, None for the dtype of the parameter, but float32
            for float16, which cannot hold small gradients.
    """
    half = parameter.dtype if parameter.dtype in HALF else dtype
    if grad_dtype is None and half is torch.float16:
        grad_dtype = torch.float32
    if parameter.dtype not in HALF:
        value = parameter.detach()
        _become(parameter, torch.empty_like(value, dtype=half), grad_dtype or half)
        write(Piece(parameter), value)
        return
    kept_or_new(parameter)
    if grad_dtype is not None:
        keep_gradient_in(parameter, grad_dtype)


def to_float32(parameter: Tensor) -> None:
    """Makes a parameter with a master a float32 one, exactly."""
    if master_of(parameter) is None:
        return
    value = true_value(parameter)
    keep(parameter, None)
    _become(parameter, value, torch.float32)


def _become(parameter: Tensor, value: Tensor, grad_dtype: torch.dtype) -> None:
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    set_grad_dtype(parameter, grad_dtype)
    if gradient is not None:
        # Once, as a gradient in float32 would not come back from float16.
        parameter.grad = gradient.to(grad_dtype)


def keep_gradient_in(parameter: Tensor, dtype: torch.dtype) -> None:
    """Sets the dtype in which the gradient of a parameter is kept and added up."""
    gradient, parameter.grad = parameter.grad, None
    set_grad_dtype(parameter, dtype)
    if gradient is not None:
        parameter.grad = gradient.to(dtype)


def flatten(modules: Iterable[nn.Module]) -> None:
    """Lets recurrent modules put their weights in one piece of memory, as their kernels want."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
