"""Steps of float16 parameters, whose small updates a float32 master keeps."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.core import levels_to_user
from halfstep.torch._masters._feeding import OF_SCALERS, feeding_of
from halfstep.torch._masters._layouts import NAMES
from halfstep.torch._scaling._gradients import parameters_of


class RoundedStateWarning(UserWarning):
    """Optimizer state of float16 parameters was rounded to float16 before it could be kept."""


def has_half(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer trains a float16 parameter, and nobody else keeps its master."""
    half = any(each.dtype is torch.float16 for each in parameters_of(optimizer))
    return half and feeding_of(optimizer) in (None, OF_SCALERS)


def step_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Steps an optimizer, with float32 masters in the place of float16 parameters."""
    if not has_half(optimizer):
        return optimizer.step(*args, **kwargs)
    if feeding_of(optimizer) is None:
        _warn_of_narrow(optimizer)
        OF_SCALERS.begin(optimizer)
    own = getattr(optimizer, "__dict__", {}).get("step")
    return OF_SCALERS.step(optimizer, own, args, kwargs)


def _warn_of_narrow(optimizer: Optimizer) -> None:
    """Warns if an optimizer was loaded before anybody could keep its state in float32."""
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter) or {}
        names = _narrow(state) if parameter.dtype is torch.float16 else []
        if not NAMES.isdisjoint(names):
            return  # an error, as it cannot be mended
        # Adagrad makes its state before the first step.
        if names and state.get("step", 1) != 0:
            text = (
                f"Optimizer state of float16 parameters ({', '.join(names)}) was rounded to "
                "float16, by load_state_dict() or by steps without the scaler. Small values are 0 "
                "now, so the next steps may be far too large. Call keep_masters(optimizer) before "
                "load_state_dict()."
            )
            warnings.warn(RoundedStateWarning(text), stacklevel=levels_to_user())
            return


def _narrow(state: Any) -> list[str]:
    """Returns the names of state in float16."""
    pairs = state.items() if isinstance(state, dict) else ()
    return [
        name for name, value in pairs if isinstance(value, Tensor) and value.dtype is torch.float16
    ]
