"""Lets masters follow where modules convert their parameters, and load them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._kept import keep, master_of, write
from halfstep.torch._masters._layouts import Master, exactly
from halfstep.torch._masters._pieces import Piece
from halfstep.torch._patches import replace


@functools.cache
def follow_modules() -> None:
    """Looks at parameters with masters whenever a module is converted or loaded, from now on."""
    replace(nn.Module, "_apply", _converting)
    replace(nn.Module, "_load_from_state_dict", _loading)


def _converting(convert: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own = [(each, master_of(each)) for each in module.parameters(recurse=False)]
    before = [(each, each.data, master) for each, master in own if master is not None]
    result = convert(module, *args, **kwargs)
    for parameter, low, master in before:
        if parameter.dtype is not low.dtype and not parameter.is_meta:
            _take_over(parameter, low, master)
    return result


@torch.no_grad()
def _take_over(parameter: Tensor, low: Tensor, master: Master) -> None:
    """Gives a parameter of another dtype the exact value that it had."""
    value = _laid_out(parameter, exactly(master, Piece(low)))
    keep(parameter, None)
    if parameter.dtype in HALF:
        write(Piece(parameter), value)
    else:
        parameter.copy_(value)


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
