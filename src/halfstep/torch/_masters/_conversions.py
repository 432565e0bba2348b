"""Lets the exact value of a parameter follow where `module.float()` and the like bring it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._kept import keep, master_of, write
from halfstep.torch._masters._layouts import Master, exactly
from halfstep.torch._masters._pieces import Piece
from halfstep.torch._patches import replace


@functools.cache
def follow_conversions() -> None:
    """Looks at parameters with masters whenever a module is converted, from now on."""
    replace(nn.Module, "_apply", _converting)


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
    value = exactly(master, Piece(low)).to(parameter.device)
    keep(parameter, None)
    if parameter.dtype in HALF:
        write(Piece(parameter), value)
    else:
        parameter.copy_(value)
