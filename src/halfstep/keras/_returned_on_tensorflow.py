"""Gradients that come back to outputs on TensorFlow, for which its tapes are asked."""

import threading
from collections.abc import Iterator
from typing import Any

from halfstep.core import replace
from halfstep.keras._patches import Undo
from halfstep.keras._private import tensorflow as tf
from halfstep.keras._returned import Returned, floats


class _Local(threading.local):
    def __init__(self) -> None:
        # The tapes that record, each with the outputs that it has seen.
        self.tapes: dict[int, list[tuple[Returned, int, Any]]] = {}
        self.recording: list[Any] = []


_local = _Local()


def install() -> Iterator[Undo]:
    """Yields what undoes each change that lets tapes be asked for more."""
    yield replace(tf.GradientTape, "__enter__", _enter)
    yield replace(tf.GradientTape, "__exit__", _exit)
    yield replace(tf.GradientTape, "gradient", _gradient)


def watched(outputs: Any, returned: Returned) -> Any:
    """Returns the outputs, which tapes that record will tell the gradients of."""
    for tape in _local.recording:
        for place, each in enumerate(floats(outputs)):
            tape.watch(each)
            _local.tapes[id(tape)].append((returned, place, each))
    return outputs


def _enter(original: Any, tape: Any) -> Any:
    _local.recording.append(tape)
    _local.tapes[id(tape)] = []
    return original(tape)


def _exit(original: Any, tape: Any, *error: Any) -> Any:
    _local.recording = [each for each in _local.recording if each is not tape]
    return original(tape, *error)


def _gradient(original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kw: Any) -> Any:
    seen = [] if tf.inside_function() else _local.tapes.get(id(tape), [])
    if not seen:
        return original(tape, target, sources, *args, **kw)
    tensors = [tensor for _, _, tensor in seen]
    asked, more = original(tape, target, [sources, tensors], *args, **kw)
    for (returned, place, _), gradient in zip(seen, more, strict=True):
        returned.take(place, gradient)
    if not tape._persistent:
        del _local.tapes[id(tape)]
    return asked
