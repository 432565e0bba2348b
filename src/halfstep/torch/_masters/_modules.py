"""Lets masters follow where modules convert, load and copy their parameters."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._kept import keep, master_of, set_grad_dtype, write
from halfstep.torch._masters._layouts import Master, exactly, loaded
from halfstep.torch._masters._pieces import Piece
from halfstep.torch._patches import replace


@functools.cache
def follow_modules() -> None:
    """Looks at parameters with masters that are converted, loaded or copied, from now on."""
    replace(nn.Module, "_apply", _converting)
    replace(nn.Parameter, "__deepcopy__", _copying)
    replace(nn.Module, "_load_from_state_dict", _loading)


def _converting(convert: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    kept = {
        name: (each.data, master, master.is_known(each))
        for name, each in module._parameters.items()
        if each is not None and (master := master_of(each)) is not None
    }
    result = convert(module, *args, **kwargs)
    for name, (low, master, known) in kept.items():
        # PyTorch may be set to make new parameters, or to swap them with their attributes.
        parameter = module._parameters[name]
        if parameter is not None and not parameter.is_meta:
            _take_over(parameter, low, master, known=known)
    return result


@torch.no_grad()
def _take_over(parameter: Tensor, low: Tensor, master: Master, *, known: bool) -> None:
    """Gives a parameter that was converted the exact value that it had."""
    if parameter.dtype is low.dtype:
        keep(parameter, master)
        master.is_moved(parameter, known=known)
        return
    value = _laid_out(parameter, exactly(master, Piece(low), known=known))
    keep(parameter, None)
    if parameter.dtype in HALF:
        write(Piece(parameter), value)
    else:
        parameter.copy_(value)


def _copying(copy: Callable[..., Tensor], parameter: Tensor, memo: dict[int, Any]) -> Tensor:
    copied, master = copy(parameter, memo), master_of(parameter)
    if master is not None and master_of(copied) is None:
        keep(copied, loaded(copied, master.kept))
        set_grad_dtype(copied, parameter.grad_dtype)
    return copied


def _loading(
    load: Callable[..., Any],
    module: nn.Module,
    state_dict: Mapping[str, Any],
    prefix: str,
    *args: Any,
    **kwargs: Any,
) -> None:
    load(module, state_dict, prefix, *args, **kwargs)
    for name, parameter in module.named_parameters(recurse=False):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == parameter.shape:
            _complete(parameter, value)


def _complete(parameter: Tensor, value: Tensor) -> None:
    """Gives a parameter all bits of what it was loaded with.

    What was saved in half precision has its other bits in the state of the optimizer.
    """
    if value.dtype not in HALF and master_of(parameter) is not None:
        write(Piece(parameter), _laid_out(parameter, value))


def _laid_out(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns a value in float32, in the order of the parameter's numbers in memory."""
    return torch.empty_like(parameter.detach(), dtype=torch.float32).copy_(value.detach())
