"""The autocast state of a forward pass, kept for its backward."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from halfstep.torch._engine import _state
from halfstep.torch._engine._paths import PATHS
from halfstep.torch._tracing import constant, ready


class Snapshot(NamedTuple):
    """The autocast state of one type of device.

    Args:
        device_type: The type of device.
        dtype: The low dtype.
        enabled: Whether autocast was on.
        cached: Whether weights were cast once.
        rules: The rules as text, empty where only PyTorch's autocast was in force.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cached: bool
    rules: str


class Restored:
    """A region in which a state is in force again."""

    def __init__(self, state: Snapshot) -> None:
        self._state = state

    def __enter__(self) -> None:
        state = self._state
        ready()
        _state.enter(state.device_type, state.dtype, state.enabled, state.cached, state.rules)

    def __exit__(self, *error: object) -> None:
        _state.leave()


# The rules in force are part of what guards a graph, so a tracer may take them for a constant.
@constant
def snapshot(device_type: str, island: bool = False) -> Snapshot:
    """Returns the autocast state of one type of device in this thread.

    Args:
        device_type: The type of device.
        island: Whether autocast is to be off in the snapshot, whatever it is now.
    """
    dtype = torch.get_autocast_dtype(device_type)
    enabled = torch.is_autocast_enabled(device_type) and not island
    for active in _state.actives():
        if active.device_type == device_type:
            table = active.table
            return Snapshot(device_type, dtype, enabled, table.scope.cached, table.rules_text)
    return Snapshot(device_type, dtype, enabled, False, "")


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs by the rules under which it was bound, wherever it is called."""
    states = [snapshot(active.device_type) for active in reversed(_state.actives())]
    position = PATHS.position()

    def bound(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for state in states or _without_ours():
                stack.enter_context(Restored(state))
            stack.enter_context(PATHS.at(position))
            return function(*args, **kwargs)

    return bound


def _without_ours() -> list[Snapshot]:
    """Returns the present state, less the rules of ours."""
    return [snapshot(active.device_type)._replace(rules="") for active in _state.actives()]
