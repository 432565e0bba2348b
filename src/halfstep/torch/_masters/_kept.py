"""Which parameter has a master, and what the value of a parameter truly is."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._layouts import Master, Split, Wide, exactly, loaded
from halfstep.torch._masters._pieces import Piece

# The attribute of a parameter that is its master, so that it goes with its parameter.
_ATTRIBUTE = "halfstep_master"


def master_of(parameter: Tensor) -> Master | None:
    """Returns the master of a parameter, if it has one."""
    found: Any = parameter.__dict__.get(_ATTRIBUTE)
    if found is None or parameter.dtype not in HALF:
        return None
    if not isinstance(found, Master):
        # Of a parameter that was unpickled.
        found = loaded(parameter, found)
        keep(parameter, found)
    return found if found.fits(parameter) else None


def keep(parameter: Tensor, master: Master | None) -> None:
    """Gives a parameter a master, or takes it away."""
    if master is not None:
        parameter.__dict__[_ATTRIBUTE] = master
    else:
        parameter.__dict__.pop(_ATTRIBUTE, None)


def without_masters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Returns trained parameters in half precision that have no master, with their names."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype in HALF and master_of(parameter) is None:
            yield name, parameter


def kept_or_new(parameter: Tensor) -> Master:
    """Returns the master of a parameter, a new one if it has none."""
    master = master_of(parameter)
    if master is None:
        master = Split(parameter)
        keep(parameter, master)
    return master


def set_grad_dtype(parameter: Tensor, dtype: torch.dtype | None) -> None:
    """Sets the dtype of a gradient, if it is another; one that is not set follows the parameter."""
    if parameter.is_leaf and parameter.grad_dtype is not dtype:
        parameter.grad_dtype = dtype


def write(piece: Piece, value: Tensor) -> None:
    """Gives a piece of a parameter a value, exactly.

    Where a remainder of 16 bits cannot hold it the parameter gets a whole master.
    """
    parameter = piece.parameter
    if not kept_or_new(parameter).write(piece, value):
        wide = Wide(parameter, true_value(parameter))
        keep(parameter, wide)
        wide.write(piece, value)


def true_value(parameter: Tensor) -> Tensor:
    """Returns what a parameter holds, with the bits that only its master has.

    Args:
        parameter: The parameter, of any dtype.

    Returns:
        A new float32 tensor for a parameter in half precision; the parameter itself, detached,
        for any other.

    Example:
        >>> true_value(torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))).dtype
        torch.float32
    """
    if parameter.dtype not in HALF:
        return parameter.detach()
    master = master_of(parameter)
    return parameter.detach().float() if master is None else exactly(master, Piece(parameter))


def kept_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Returns what is kept for the parameters that an optimizer trains."""
    groups = optimizer.param_groups
    return tensors_of(each for group in groups for each in group["params"])


def tensors_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Returns what is kept for parameters."""
    masters = [master_of(each) for each in parameters]
    return [master.tensor for master in masters if master]
