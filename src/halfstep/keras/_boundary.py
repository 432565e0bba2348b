"""What leaves a model leaves in the policy's output dtype.

A layer that is called on its own hands out its compute dtype, as whoever composes layers by hand
expects.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from halfstep.core import replace
from halfstep.keras._patches import Undo
from halfstep.keras._private import Layer, backend
from halfstep.keras._wide import low_dtype, lowered, notes, widened


class _Inside(threading.local):
    depth = 0


_inside = _Inside()


def install(output_dtype: str) -> Iterator[Undo]:
    """Makes what leaves a model have that dtype, and yields what undoes each change."""
    hand_out = functools.partial(_handed_out, output_dtype)
    yield replace(Layer, "__call__", _outermost(hand_out))
    # Calls the method of the layer itself.
    yield replace(
        Layer, "stateless_call", _outermost(lambda found: (hand_out(found[0]), *found[1:]))
    )
    yield replace(backend.core, "remat", _remat)


@contextlib.contextmanager
def _entered() -> Iterator[None]:
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1


def _outermost(finish: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns what lets models that no other layer calls finish what they return."""

    def around(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        with _entered():
            result = original(layer, *args, **kwargs)
        return finish(result) if not _inside.depth and isinstance(layer, keras.Model) else result

    return around


def _handed_out(dtype: str, outputs: Any) -> Any:
    return keras.tree.map_structure(functools.partial(_one_handed_out, dtype), outputs)


def _one_handed_out(dtype: str, value: Any) -> Any:
    if low_dtype(value) in (None, dtype):
        return value
    notes()(f"outputs: they leave the model in {dtype}, as a loss needs them")
    result, mask = backend.cast(widened(value), dtype), backend.get_keras_mask(value)
    if mask is not None:
        backend.set_keras_mask(result, mask)
    return result


def _remat(original: Callable[..., Any], function: Callable[..., Any]) -> Any:
    """Runs a function again in the backward pass as it ran forward, and hands on wide values."""
    if not _inside.depth:
        return original(function)

    @functools.wraps(function)
    def around(*args: Any, **kwargs: Any) -> Any:
        run = _Again(function, getattr(backend.get_autocast_scope(), "dtype", None))
        outputs = original(run)(*args, **kwargs)
        flat = zip(keras.tree.flatten(outputs), run.dtypes, strict=True)
        low = [lowered(each, dtype) if dtype else each for each, dtype in flat]
        return keras.tree.pack_sequence_as(outputs, low)

    return around


class _Again:
    """A function that runs inside a model, in the same dtype each time, and returns wide values.

    Args:
        function: It.
        scope: The dtype that variables are read in.
    """

    def __init__(self, function: Callable[..., Any], scope: str | None) -> None:
        self._function = function
        self._scope = scope
        # Of what it returned, before that was widened.
        self.dtypes: list[str | None] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _entered(), backend.AutocastScope(self._scope):
            outputs = self._function(*args, **kwargs)
        self.dtypes = [low_dtype(each) for each in keras.tree.flatten(outputs)]
        return keras.tree.map_structure(widened, outputs)
