"""What a script asks for itself: autocasts, scalers, regions, policies; told as events."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from halfstep.core import emit, subscribe
from halfstep.torch._autocast import autocast
from halfstep.torch._dtypes import name_of
from halfstep.torch._observing._sources import by_torch, entered, here, marked, source_of
from halfstep.torch._patches import Undo, replace
from halfstep.torch._private import in_backward
from halfstep.torch._scaler import GradScaler
from halfstep.torch._scales import Scales

_NATIVE, _OURS = "torch.autocast", "halfstep.torch.autocast"
_NATIVE_SCALER, _OUR_SCALER = "torch.amp.GradScaler", "halfstep.torch.GradScaler"
_SCALERS = {_NATIVE_SCALER: torch.amp.GradScaler, _OUR_SCALER: GradScaler}
# What PyTorch enters again where the script is in one already.
_OF_TORCH = "torch"
# What a scaler has in place of a format once it has scaled a loss.
IN_USE = "in use"
# What asks by an event of its own, with a policy.
_BY_POLICY = {"region": "prepare", "policy": "set_global_policy"}


class _Local(threading.local):
    def __init__(self) -> None:
        # The lines of the autocasts that were entered and cast anything, the innermost last.
        self.sources: list[str] = []


class Own:
    """Notices what a script asks for itself, and in which line.

    It is told as the event "precision": how it was asked for, in which form, and where. A scaler
    has none until it is in use.

    Example:
        >>> unsubscribe = subscribe(lambda event, values: print(event, values["how"]))
        >>> own = Own()
        >>> end = own.start()
        >>> with torch.autocast("cpu", dtype=torch.float16):
        ...     pass
        precision torch.autocast
        >>> end()
        >>> unsubscribe()
    """

    def __init__(self) -> None:
        self._local = _Local()
        self.scales = Scales(_scaler_used)

    def start(self) -> Undo:
        """Begins to notice, and returns what ends it."""
        undo = [
            replace(torch.autocast, "__init__", _made),
            replace(autocast, "__init__", _made),
            replace(torch.autocast, "__enter__", self._enter_native),
            replace(autocast, "__enter__", self._enter_ours),
            replace(autocast, "__call__", self._decorate),
            *(replace(each, "__exit__", self._leave) for each in (torch.autocast, autocast)),
            *(
                replace(kind, "__init__", functools.partial(_scaler_made, how))
                for how, kind in _SCALERS.items()
            ),
            self.scales.start(),
            subscribe(_by_policy),
        ]

        def end() -> None:
            while undo:
                undo.pop()()

        return end

    @property
    def around(self) -> str:
        """The line of the innermost autocast that this thread is in, "" where it is not known."""
        return next(filter(None, reversed(self._local.sources)), "")

    def _enter_native(self, original: Any, made: Any) -> Any:
        self._enter(_NATIVE, made, "" if made._enabled else None)
        return original(made)

    def _enter_ours(self, original: Any, made: autocast) -> Any:
        self._enter(_OURS, made, _rules_of(made))
        with entered(source_of(made)):
            return original(made)

    def _enter(self, how: str, made: Any, rules: str | None) -> None:
        """Takes note of an autocast that is entered; no rules stand for one that casts nothing."""
        # Within a backward pass it is a checkpoint that computes its part again.
        if rules is not None and source_of(made) != _OF_TORCH and not in_backward():
            what = {"how": how, "form": name_of(made.fast_dtype), "source": source_of(made)}
            emit("precision", **what, device=made.device, rules=rules)
        self._local.sources.append("" if rules is None else source_of(made))

    def _leave(self, original: Any, made: Any, *error: Any) -> Any:
        if self._local.sources:
            self._local.sources.pop()
        return original(made, *error)

    def _decorate(self, original: Any, made: autocast, function: Callable[..., Any]) -> Any:
        inside = original(made, function)

        @functools.wraps(inside)
        def noticed(*args: Any, **kwargs: Any) -> Any:
            self._enter(_OURS, made, _rules_of(made))
            try:
                with entered(source_of(made)):
                    return inside(*args, **kwargs)
            finally:
                self._local.sources.pop()

        return noticed


def _rules_of(made: autocast) -> str | None:
    return str(made.rules) if made.enabled else None


def _made(original: Callable[..., None], made: Any, *args: Any, **kwargs: Any) -> None:
    original(made, *args, **kwargs)
    marked(made, _OF_TORCH if by_torch() else here())


def _scaler_made(
    how: str, original: Callable[..., None], scaler: Any, *args: Any, **kwargs: Any
) -> None:
    original(scaler, *args, **kwargs)
    if scaler.is_enabled():
        emit("precision", how=how, form="", source=source_of(marked(scaler, here())))


def _scaler_used(scaler: Any) -> None:
    how = _OUR_SCALER if isinstance(scaler, GradScaler) else _NATIVE_SCALER
    emit("precision", how=how, form=IN_USE, source=source_of(scaler))


def _by_policy(event: str, values: dict[str, Any]) -> None:
    if event in _BY_POLICY and not values.get("automatic"):
        emit("precision", how=_BY_POLICY[event], form=values["policy"], source=here())
