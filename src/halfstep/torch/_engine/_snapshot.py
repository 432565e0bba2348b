"""The autocast state of a forward pass, kept for its backward."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from halfstep.torch._engine import _state


class Snapshot(NamedTuple):
    """The autocast state of one type of device, to be restored in backward.

    Args:
        device_type: The type of device.
        dtype: The low dtype.
        enabled: Whether autocast was on.
        cached: Whether weights were cast once.
        rules: The rules as text, or None where only PyTorch's autocast was on.
    """

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cached: bool
    rules: str | None

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Enters the state again."""
        if self.rules is None:
            with torch.autocast(self.device_type, self.dtype, self.enabled):
                yield
            return
        _state.enter(self.device_type, self.dtype, self.enabled, self.cached, self.rules)
        try:
            yield
        finally:
            _state.leave()


def snapshot(device_type: str) -> Snapshot:
    """Returns the autocast state of one type of device in this thread."""
    dtype = torch.get_autocast_dtype(device_type)
    enabled = torch.is_autocast_enabled(device_type)
    for active in _state.actives():
        if active.device_type == device_type:
            scope = active.table.scope
            return Snapshot(device_type, dtype, enabled, scope.cached, str(scope.rules))
    return Snapshot(device_type, dtype, enabled, False, None)


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs inside the regions in which it was bound, wherever it is called.

    Outside of every region it is the function itself.
    """
    states = [snapshot(active.device_type) for active in reversed(_state.actives())]
    if not states:
        return function

    def bound(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for state in states:
                stack.enter_context(state.restored())
            return function(*args, **kwargs)

    return bound
