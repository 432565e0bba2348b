"""Masters in the state dict of an optimizer, and state that loading does not round.

`Optimizer.load_state_dict` rounds what it loads to the dtype of the parameter: a second moment of
1e-9 becomes 0 in float16, and a remainder becomes a float.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._dtypes import name_of
from halfstep.torch._masters._bits import split
from halfstep.torch._masters._kept import HALF, keep, master_of
from halfstep.torch._masters._layouts import Master, Split, Wide
from halfstep.torch._masters._state import widen_state
from halfstep.torch._scaling._optimizers import PerOptimizer

_WHOLE = "master"
_REMAINDERS = {dtype: f"{name_of(dtype)}_remainder" for dtype in HALF}
_OURS = {_WHOLE, *_REMAINDERS.values()}

_watched: PerOptimizer[bool] = PerOptimizer()


def save_with_state(optimizer: Optimizer) -> None:
    """Lets the state dict of an optimizer hold the masters of its parameters, from now on."""
    if _watched.get(optimizer):
        return
    _watched[optimizer] = True
    latest: list[Any] = []

    def before(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        latest[:] = [state_dict["state"]]
        return {**state_dict, "state": without_masters(state_dict["state"])}

    def after(optimizer: Optimizer) -> None:
        _take_over(optimizer, latest.pop())

    optimizer.register_state_dict_post_hook(_add)
    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)


def _add(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    states = state_dict["state"]
    for key, parameter in _keyed(optimizer):
        master = master_of(parameter)
        if master is not None:
            (name, tensor), *_ = saved(master, parameter).items()
            states[key] = {**states.get(key, {}), name: tensor}


def saved(master: Master, parameter: Tensor) -> dict[str, Tensor]:
    """Returns a master under the name that it has in a state dict."""
    (tensor,) = master.tensors()
    name = _REMAINDERS[parameter.dtype] if isinstance(master, Split) else _WHOLE
    return {name: tensor}


def without_masters(states: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the state that the optimizer itself keeps."""
    own = {
        key: {name: value for name, value in state.items() if name not in _OURS}
        if isinstance(state, dict)
        else state
        for key, state in states.items()
    }
    return {key: state for key, state in own.items() if state or state == states[key]}


def _keyed(optimizer: Optimizer) -> Iterator[tuple[int, Tensor]]:
    """Returns the parameters, each once, with their numbers in a state dict."""
    seen: set[int] = set()
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield number, parameter
            number += 1


def _take_over(optimizer: Optimizer, states: Mapping[Any, Any]) -> None:
    for key, parameter in _keyed(optimizer):
        state = states.get(key)
        if parameter.dtype in HALF and isinstance(state, dict):
            _load(parameter, state)
            _restore(optimizer.state.get(parameter), state, parameter)
            widen_state(optimizer.state, parameter)


def _load(parameter: Tensor, state: Mapping[str, Any]) -> None:
    """Gives a parameter the master in a state, whether or not its own value was loaded yet."""
    own = _REMAINDERS[parameter.dtype]
    other = next((name for name in _REMAINDERS.values() if name in state and name != own), None)
    if other:
        raise UsageError(
            f"load_state_dict() needs {own!r} for a parameter in {name_of(parameter.dtype)}, got "
            f"{other!r}. Prepare the model with the param_dtype that the checkpoint was saved with."
        )
    if own in state:
        master = Split(parameter)
        master.remainder.copy_(state[own])
        keep(parameter, master)
    elif _WHOLE in state:
        _load_whole(parameter, state[_WHOLE])


def _load_whole(parameter: Tensor, value: Tensor) -> None:
    wide = Wide(parameter, value)
    master = Split(parameter)
    low = torch.empty_like(parameter.detach())
    exact = split(wide.value, low, master.remainder)
    keep(parameter, master if exact else wide)


def _restore(state: Any, given: Mapping[str, Any], parameter: Tensor) -> None:
    """Puts back in its own dtype what loading has rounded to that of the parameter."""
    for name, value in state.items() if isinstance(state, dict) else ():
        original = given.get(name)
        if not (isinstance(value, Tensor) and isinstance(original, Tensor)):
            continue
        if value.dtype in HALF and value.dtype is not original.dtype:
            state[name] = original.to(device=parameter.device, copy=True)
