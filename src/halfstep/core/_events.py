"""What a run tells whoever listens: losses, steps, scale changes and metrics."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from halfstep.errors import UsageError

Callback = Callable[[str, dict[str, Any]], object]

_callbacks: tuple[Callback, ...] = ()
_lock = threading.Lock()


def subscribe(callback: Callback) -> Callable[[], None]:
    """Calls `callback(event, values)` for every event from now on, in every thread.

    Args:
        callback: Receives the name of the event and a dict of its values.

    Returns:
        A function that ends the subscription; calling it again has no effect.

    Example:
        >>> unsubscribe = subscribe(lambda event, values: print(event, values))
        >>> emit("step", number=1)
        step {'number': 1}
        >>> unsubscribe()
        >>> emit("step", number=2)
    """
    global _callbacks
    entry = _Subscription(callback)
    with _lock:
        _callbacks = (*_callbacks, entry)
    return lambda: _unsubscribe(entry)


class _Subscription:
    """One subscription, so that the same callback can be subscribed twice."""

    def __init__(self, callback: Callback) -> None:
        self._callback = callback

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        self._callback(event, values)


def _unsubscribe(entry: Callback) -> None:
    global _callbacks
    with _lock:
        _callbacks = tuple(other for other in _callbacks if other is not entry)


def listening() -> bool:
    """Returns whether anybody subscribed, so that costly values need not be made for nobody.

    Example:
        >>> listening()
        False
    """
    return bool(_callbacks)


def emit(event: str, /, **values: Any) -> None:
    """Hands an event to every subscriber, in the order of their subscriptions.

    Args:
        event: The name of the event, such as "loss", "step", "update" or "metric".
        values: What there is to say about it.

    Example:
        >>> emit("loss", value=0.5)
    """
    if event not in _quiet.events:
        for callback in _callbacks:
            callback(event, values)


class _Quiet(threading.local):
    events: tuple[str, ...] = ()


_quiet = _Quiet()


@contextlib.contextmanager
def quiet(*events: str) -> Iterator[None]:
    """Hands on no such events of this thread until the block ends: somebody else tells of them.

    Args:
        events: Their names.

    Example:
        >>> unsubscribe = subscribe(lambda event, values: print(event))
        >>> with quiet("loss"):
        ...     emit("loss", value=0.5)
        >>> unsubscribe()
    """
    before = _quiet.events
    _quiet.events = (*before, *events)
    try:
        yield
    finally:
        _quiet.events = before


def metric(name: str, value: float) -> None:
    """Reports a metric of the training script; without a listener nothing happens.

    Args:
        name: What is measured, such as "accuracy".
        value: A number, or anything that `float` accepts, such as a tensor of one element.

    Example:
        >>> metric("accuracy", 0.98)
    """
    if not isinstance(name, str) or not name.strip():
        raise UsageError(f"A metric needs a name, got {name!r}. Write metric('accuracy', 0.98).")
    emit("metric", name=name, value=_as_float(name, value))


def _as_float(name: str, value: Any) -> float:
    try:
        if not isinstance(value, (bool, str, bytes)):
            # PyTorch warns where a tensor that requires a gradient becomes a float.
            return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        pass
    raise UsageError(
        f"The metric {name!r} needs a number, got {value!r}. Pass a float or a 0-dim tensor."
    )
