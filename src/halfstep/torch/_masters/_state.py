"""The state that an optimizer keeps for a parameter, and for a piece of it."""

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._pieces import Piece, is_dense


def is_laid_out(value: Any, parameter: Tensor) -> bool:
    """Returns whether a value of the state has one number for each of the parameter's."""
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.stride() == parameter.stride()
    )


def may_be_cut(parameter: Tensor, state: Any) -> bool:
    """Returns whether a parameter can be stepped in pieces, with the state that it has.

    State that is yet to be made has to be made of all of it.
    """
    gradient = parameter.grad
    if (
        not state
        or gradient is None
        or not (is_dense(parameter) and is_laid_out(gradient, parameter))
    ):
        return False
    tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
    return all(type(each) is Tensor and is_laid_out(each, parameter) for each in tensors)


def cut_state(states: MutableMapping[Tensor, Any], piece: Piece) -> Any:
    """Returns the state for a piece, and takes that of a whole parameter out of the states."""
    if piece.stop is None:
        return states.pop(piece.parameter)
    return {
        key: piece.of(value) if is_laid_out(value, piece.parameter) else _copied(value)
        for key, value in states[piece.parameter].items()
    }


def _copied(value: Any) -> Any:
    """Returns what each piece counts by itself, such as the number of steps."""
    return value.clone() if isinstance(value, Tensor) else value


def joined_state(states: MutableMapping[Tensor, Any], piece: Piece, state: Any) -> None:
    """Puts the state of a piece back to that of its parameter."""
    if piece.stop is None:
        states[piece.parameter] = state
    elif piece.stop == piece.parameter.numel():
        own = states[piece.parameter]
        own.update({key: state[key] for key in own if not is_laid_out(own[key], piece.parameter)})


def widen_state(states: MutableMapping[Tensor, Any], parameter: Tensor) -> None:
    """Makes the state float32 that was made, or loaded, in the dtype of the parameter."""
    state = states.get(parameter)
    pairs = [*state.items()] if isinstance(state, dict) else []
    for key, value in pairs:
        if isinstance(value, Tensor) and value.dtype in HALF and value.dtype is parameter.dtype:
            states[parameter][key] = value.float()


def narrow_state(states: MutableMapping[Tensor, Any], parameter: Tensor) -> None:
    """Makes the state what an optimizer of a parameter in half precision makes of its own."""
    state = states.get(parameter)
    pairs = [*state.items()] if isinstance(state, dict) else []
    for key, value in pairs:
        wide = type(value) is Tensor and value.dtype is torch.float32
        if wide and value.shape == parameter.shape and key != "step":
            states[parameter][key] = value.to(parameter.dtype)
