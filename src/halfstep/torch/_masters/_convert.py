"""Makes parameters half-precision ones with a master, and float32 ones again."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from halfstep.errors import UsageError
from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._kept import (
    keep,
    kept_or_new,
    master_of,
    set_grad_dtype,
    true_value,
    write,
)
from halfstep.torch._masters._pieces import Piece
from halfstep.torch._masters._state import narrow_state


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


class Halved:
    """Parameters that were given masters, and what they were before.

    Args:
        made: Those that were float32.
        given: Those that were in half precision, without a master.
    """

    def __init__(self, made: Iterable[Tensor] = (), given: Iterable[Tensor] = ()) -> None:
        self._made = [TensorWeakRef(each) for each in made]
        self._given = [TensorWeakRef(each) for each in given]

    def undo(self, optimizers: Iterable[Optimizer]) -> None:
        """Makes them what they were, and the state of optimizers fit for them."""
        for parameter in _alive(self._made):
            to_float32(parameter)
        for parameter in _alive(self._given):
            if parameter.dtype in HALF:
                keep(parameter, None)
                _become(parameter, parameter.data, parameter.dtype)
                for optimizer in optimizers:
                    narrow_state(optimizer.state, parameter)
        self._made, self._given = [], []

    def of_copies(self, copies: Mapping[int, Any]) -> "Halved":
        """Returns the same of copies, by the number of the original, which have masters too."""
        made, given = (
            [copies[id(each)] for each in _alive(refs) if id(each) in copies]
            for refs in (self._made, self._given)
        )
        return Halved(made, given)


def _alive(refs: Iterable[TensorWeakRef]) -> Iterator[Tensor]:
    return (each for each in (ref() for ref in refs) if each is not None)


def halved(
    parameters: Iterable[Tensor], dtype: torch.dtype, grad_dtype: torch.dtype | None
) -> Halved:
    """Gives parameters exact masters.

    Args:
        parameters: Parameters in float32, or in half precision, which keep their dtype.
        dtype: What a float32 parameter becomes.
        grad_dtype: What gradients are kept in, None for the dtype of the parameter, but float32
            for float16, which cannot hold small gradients.
    """
    found = [*parameters]
    made = [each for each in found if each.dtype not in HALF]
    given = [each for each in found if each.dtype in HALF and master_of(each) is None]
    for parameter in found:
        half = parameter.dtype if parameter.dtype in HALF else dtype
        gradient = grad_dtype or (torch.float32 if half is torch.float16 else None)
        _to_half(parameter, half, gradient)
    return Halved(made, given)


def _to_half(parameter: Tensor, dtype: torch.dtype, grad_dtype: torch.dtype | None) -> None:
    if parameter.dtype is dtype:
        kept_or_new(parameter)
        if grad_dtype is not None:
            _become(parameter, parameter.data, grad_dtype)
        return
    value = parameter.detach()
    _become(parameter, torch.empty_like(value, dtype=dtype), grad_dtype or dtype)
    write(Piece(parameter), value)


def to_float32(parameter: Tensor) -> None:
    """Makes a parameter with a master a float32 one, exactly."""
    if master_of(parameter) is None:
        return
    value = true_value(parameter)
    keep(parameter, None)
    _become(parameter, value, torch.float32)


def _become(parameter: Tensor, value: Tensor, grad_dtype: torch.dtype) -> None:
    """Gives a parameter other numbers, and sets the dtype in which its gradient adds up."""
    gradient, parameter.grad = parameter.grad, None
    parameter.data = value
    set_grad_dtype(parameter, grad_dtype)
    if gradient is not None:
        # Once, as a gradient in float32 would not come back from float16.
        parameter.grad = gradient.to(grad_dtype)


def flatten(modules: Iterable[nn.Module]) -> None:
    """Lets recurrent modules put their weights in one piece of memory, as their kernels want."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
