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
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._optimizers import PerOptimizer

_WHOLE = "master"
_REMAINDERS = {dtype: f"{name_of(dtype)}_remainder" for dtype in HALF}
_OURS = {_WHOLE, *_REMAINDERS.values()}
_GIVEN = "halfstep_given"

_watched: PerOptimizer[bool] = PerOptimizer()
# Masters of parameters without any other state, while a state dict is loaded.
_unstepped: PerOptimizer[list[tuple[Tensor, Mapping[str, Any]]]] = PerOptimizer()


class _Given:
    """The state of one parameter as it was saved, which loading hands on untouched.

    It travels with what is loaded, because hooks may map states to other parameters.

    Args:
        state: The state.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state = state


def save_with_state(optimizer: Optimizer) -> None:
    """Lets the state dict of an optimizer hold the masters of its parameters, from now on."""
    if _watched.get(optimizer):
        return
    _watched[optimizer] = True
    optimizer.register_state_dict_post_hook(_add)
    optimizer.register_load_state_dict_pre_hook(_mark)
    optimizer.register_load_state_dict_post_hook(_take_over)


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


def _mark(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = state_dict["state"]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    pairs = zip(keys, parameters_of(optimizer), strict=False)
    _unstepped[optimizer] = [
        (parameter, states[key]) for key, parameter in pairs if _is_unstepped(states.get(key))
    ]
    marked = {
        key: {**_without_masters(state), _GIVEN: _Given(state)}
        if isinstance(state, dict)
        else state
        for key, state in states.items()
        if not _is_unstepped(state)
    }
    return {**state_dict, "state": marked}


def _is_unstepped(state: Any) -> bool:
    """Returns whether nothing is kept but a master, where optimizers look for no state at all."""
    return isinstance(state, dict) and bool(state) and not _without_masters(state)


def _without_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state that the optimizer itself keeps."""
    return {name: value for name, value in state.items() if name not in _OURS}


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


def _take_over(optimizer: Optimizer) -> None:
    unstepped = _unstepped.get(optimizer) or ()
    _unstepped.pop(optimizer)
    for parameter, given in unstepped:
        if parameter.dtype in HALF:
            _load(parameter, given)
    for parameter, state in list(optimizer.state.items()):
        found = state.pop(_GIVEN, None) if isinstance(state, dict) else None
        if found is not None and isinstance(parameter, Tensor) and parameter.dtype in HALF:
            _load(parameter, found.state)
            _restore(state, found.state, parameter)
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
    _refuse_shape(parameter, {name: state[name] for name in (own, _WHOLE) if name in state})
    if own in state:
        master = Split(parameter)
        master.remainder.copy_(state[own])
        keep(parameter, master)
    elif _WHOLE in state:
        _load_whole(parameter, state[_WHOLE])


def _refuse_shape(parameter: Tensor, found: Mapping[str, Tensor]) -> None:
    for name, tensor in found.items():
        if tensor.shape != parameter.shape:
            raise UsageError(
                f"load_state_dict() needs a {name!r} of shape {tuple(parameter.shape)}, got "
                f"{tuple(tensor.shape)}. Load it into an optimizer with the same parameters, in "
                "the same order."
            )


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
