"""Gradients that come back to outputs on TensorFlow, for which its tapes are asked."""

import threading
import weakref
from collections.abc import Iterator
from typing import Any

from halfstep.core import replace
from halfstep.keras._patches import Undo
from halfstep.keras._private import tensorflow as tf
from halfstep.keras._returned import Enough, Returned, floats, is_again

_Seen = list[tuple[Returned, int, Any]]


class _Local(threading.local):
    def __init__(self) -> None:
        # The tapes that record, each with the outputs that it has seen.
        self.tapes: weakref.WeakKeyDictionary[Any, _Seen] = weakref.WeakKeyDictionary()
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
            _local.tapes[tape].append((returned, place, each))
    return outputs


def _enter(original: Any, tape: Any) -> Any:
    _local.recording.append(tape)
    _local.tapes[tape] = []
    return original(tape)


def _exit(original: Any, tape: Any, *error: Any) -> Any:
    _local.recording = [each for each in _local.recording if each is not tape]
    return original(tape, *error)


def _gradient(original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kw: Any) -> Any:
    seen = [] if tf.inside_function() else _local.tapes.pop(tape, [])
    if not seen:
        return original(tape, target, sources, *args, **kw)
    tensors = [tensor for _, _, tensor in seen]
    # In a step that is run again the variables are plain numbers, of which the tape knows nothing.
    asked = [] if is_again() else sources
    found, more = original(tape, target, [asked, tensors], *args, **kw)
    for (returned, place, _), gradient in zip(seen, more, strict=True):
        returned.take(place, gradient)
    return _instead(sources) if is_again() else found


def _instead(sources: Any) -> Any:
    """Returns gradients of nothing, as long as another tape is still to be asked for its own."""
    if not any(_local.tapes.values()):
        raise Enough
    return tf.nest.map_structure(lambda each: tf.zeros_like(tf.convert_to_tensor(each)), sources)
