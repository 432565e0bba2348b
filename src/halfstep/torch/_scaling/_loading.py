"""Optimizer state of float16 parameters that comes from a checkpoint.

`Optimizer.load_state_dict` rounds state to the dtype of its parameter, and a second moment such as
1e-9 becomes 0 in float16. An optimizer that was stepped before can be kept from it.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._optimizers import PerOptimizer
from halfstep.torch._scaling._steps import levels_to_user


class RoundedStateWarning(UserWarning):
    """Optimizer state of float16 parameters was rounded to float16 before it could be kept."""


_kept: PerOptimizer[bool] = PerOptimizer()


def keep_wide(optimizer: Optimizer) -> None:
    """Lets an optimizer load the state of float16 parameters in the dtype it was saved in."""
    if not hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks") or _kept.get(optimizer):
        return
    _kept[optimizer] = True
    latest: list[dict[str, Any]] = []

    def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
        latest[:] = [state_dict]

    def after(optimizer: Optimizer) -> None:
        _restore(optimizer, latest.pop())

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _restore(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    groups = saved["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    for key, parameter in zip(keys, parameters_of(optimizer), strict=False):
        if parameter.dtype is torch.float16 and parameter in optimizer.state:
            _take_over(optimizer.state[parameter], saved["state"].get(key), parameter.device)


def _take_over(state: Any, saved: Any, device: torch.device) -> None:
    for name in _narrow(state):
        value = saved.get(name)
        if isinstance(value, Tensor) and value.dtype is torch.float32:
            state[name] = value.to(device, copy=True)


def _narrow(state: Any) -> list[str]:
    """Returns the names of state in float16."""
    pairs = state.items() if isinstance(state, dict) else ()
    return [
        name for name, value in pairs if isinstance(value, Tensor) and value.dtype is torch.float16
    ]


def warn_of_narrow(optimizer: Optimizer) -> None:
    """Warns if an optimizer was loaded before anybody could keep its state in float32."""
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter) or {}
        names = _narrow(state) if parameter.dtype is torch.float16 else []
        # Adagrad makes its state before the first step.
        if names and state.get("step", 1) != 0:
            text = (
                f"Optimizer state of float16 parameters ({', '.join(names)}) was rounded to "
                "float16, by load_state_dict() or by steps without the scaler. Small values are 0 "
                "now, so the next steps may be far too large. Keep the parameters in float32 with "
                "model.float(); autocast casts per operation."
            )
            warnings.warn(RoundedStateWarning(text), stacklevel=levels_to_user())
            return
