"""Masters in the state dict of an optimizer, and state that loading does not round.

`Optimizer.load_state_dict` rounds what it loads to the dtype of the parameter: a second moment of
1e-9 becomes 0 in float16, and a remainder becomes a float.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._dtypes import HALF, name_of
from halfstep.torch._masters._bits import merge
from halfstep.torch._masters._kept import keep, master_of
from halfstep.torch._masters._layouts import (
    NAMES,
    REMAINDERS,
    WHOLE,
    Kept,
    loaded,
    names_for,
    rounded,
)
from halfstep.torch._masters._state import widen_state
from halfstep.torch._masters._views import optimizers_in
from halfstep.torch._scaling._optimizers import PerOptimizer

# Where a group has the masters of parameters without state, by their place in it: optimizers take
# a parameter with any state at all for one that was stepped.
_UNSTEPPED = "halfstep_masters"
_GIVEN = "halfstep_given"

_watched: PerOptimizer[bool] = PerOptimizer()


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
    for each in optimizers_in(optimizer):
        # A wrapper may be no optimizer of PyTorch, and have no hooks.
        if hasattr(each, "register_state_dict_post_hook") and not _watched.get(each):
            _watched[each] = True
            each.register_state_dict_post_hook(_add)
            each.register_load_state_dict_pre_hook(_mark)
            each.register_load_state_dict_post_hook(adopt)


def _add(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    states = state_dict["state"]
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for place, key in enumerate(saved["params"]):
            master = master_of(group["params"][place])
            if master is not None and states.get(key):
                states[key] = {**states[key], **master.kept}
            elif master is not None:
                saved.setdefault(_UNSTEPPED, {})[place] = {**master.kept}


def _mark(_optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    marked = {
        key: {**_without_masters(state), _GIVEN: _Given(state)}
        if isinstance(state, dict)
        else state
        for key, state in state_dict["state"].items()
    }
    return {**state_dict, "state": marked}


def _without_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state that the optimizer itself keeps."""
    return {name: value for name, value in state.items() if name not in NAMES}


def adopt(optimizer: Optimizer) -> None:
    """Gives parameters the masters that a state dict has brought, also one loaded long before."""
    for group in optimizer.param_groups:
        for place, kept in group.pop(_UNSTEPPED, {}).items():
            _load(group["params"][place], kept)
    for parameter, state in list(optimizer.state.items()):
        if isinstance(parameter, Tensor) and isinstance(state, dict):
            _adopt_state(optimizer, parameter, state)


def _adopt_state(optimizer: Optimizer, parameter: Tensor, state: dict[str, Any]) -> None:
    given = state.pop(_GIVEN, None)
    source = state if given is None else given.state
    kept = {name: source[name] for name in NAMES if name in source}
    if kept:
        _load(parameter, kept)
    for name in kept:
        state.pop(name, None)
    if given is not None and parameter.dtype in HALF:
        _restore(state, given.state, parameter)
        widen_state(optimizer.state, parameter)


def _load(parameter: Tensor, kept: Kept) -> None:
    """Gives a parameter the master of a state dict, or all bits of it if it is float32."""
    _refuse_shape(parameter, kept)
    if parameter.dtype in HALF:
        _refuse_other(parameter, kept)
        _refuse_rounded(kept)
        keep(parameter, loaded(parameter, kept))
    else:
        _complete(parameter, kept)


def _refuse_shape(parameter: Tensor, kept: Kept) -> None:
    for name, tensor in kept.items():
        if tensor.shape != parameter.shape:
            raise UsageError(
                f"load_state_dict() needs a {name!r} of shape {tuple(parameter.shape)}, got "
                f"{tuple(tensor.shape)}. Load it into an optimizer with the same parameters, in "
                "the same order."
            )


def _refuse_other(parameter: Tensor, kept: Kept) -> None:
    if names_for(parameter.dtype).isdisjoint(kept):
        dtype, found = name_of(parameter.dtype), next(iter(kept))
        raise UsageError(
            f"load_state_dict() needs {REMAINDERS[parameter.dtype]!r} for a parameter in {dtype}, "
            f"got {found!r}. Prepare the model with the param_dtype that the checkpoint was saved "
            "with."
        )


def _refuse_rounded(kept: Kept) -> None:
    for tensor in kept.values():
        if tensor.dtype in HALF:
            raise UsageError(
                "Masters need a state dict that is loaded after prepare or keep_masters, got one "
                f"loaded before: PyTorch has rounded all of it to {name_of(tensor.dtype)}. Make "
                "the optimizer anew, call keep_masters(optimizer), and load the state dict then."
            )


@torch.no_grad()
def _complete(parameter: Tensor, kept: Kept) -> None:
    """Gives a float32 parameter, loaded in half precision, the bits that it lacks, if it does."""
    for dtype in HALF:
        value = _value_of(rounded(parameter, dtype), kept)
        if value is not None and _is_either(parameter, value, dtype):
            parameter.copy_(value)
            return
    raise UsageError(
        f"load_state_dict() needs the parameters of the checkpoint, of which it has the missing "
        f"bits ({', '.join(kept)}), got others. Load the state dict of the model before that of "
        "the optimizer, or prepare it with masters='split'."
    )


def _value_of(low: Tensor, kept: Kept) -> Tensor | None:
    """Returns what the master of these numbers is, None if it is of another dtype."""
    remainder = kept.get(REMAINDERS[low.dtype])
    if remainder is None:
        return kept.get(WHOLE)
    value = torch.empty_like(low, dtype=torch.float32)
    merge(low, remainder.to(low.device, torch.int16), value)
    return value


def _is_either(parameter: Tensor, value: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a parameter is a value, or what it is in half precision."""
    same = [parameter == each.to(parameter) for each in (value, rounded(value, dtype))]
    return any(bool(each.all()) for each in same)


def _restore(state: dict[str, Any], given: Mapping[str, Any], parameter: Tensor) -> None:
    """Puts back in its own dtype what loading has rounded to that of the parameter."""
    for name, value in state.items():
        original = given.get(name)
        if not (isinstance(value, Tensor) and isinstance(original, Tensor)):
            continue
        if value.dtype in HALF and value.dtype is not original.dtype:
            state[name] = original.to(device=parameter.device, copy=True)
