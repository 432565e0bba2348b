"""Hands on what each step of `fit` is taken with, compiled or not, before it is taken."""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from halfstep.core import replace
from halfstep.keras._patches import Undo
from halfstep.keras._private import tensorflow as tf

Values = list[tuple[Any, Any]]
# Takes a model, its variables with their values before the step, and the batch.
Keep = Callable[[Any, Values, Any], None]


class _Making(threading.local):
    keep: Keep | None = None  # while a train function is made


_making = _Making()


def hand_on(keep: Keep) -> Iterator[Undo]:
    """Yields what undoes each change that lets the steps of `fit` call `keep`.

    A train function that was made before stays as it is.
    """
    yield replace(keras.Model, "make_train_function", functools.partial(_make, keep))
    for name, around in _INSIDE.get(keras.config.backend(), {}).items():
        yield replace(keras.Model, name, around)


def variables_of(model: Any) -> list[Any]:
    """Returns the variables that a model computes with, in the order of its state on JAX."""
    return [*model.trainable_variables, *model.non_trainable_variables]


def _make(keep: Keep, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    _making.keep = keep
    try:
        result = original(model, *args, **kwargs)
    finally:
        _making.keep = None
    if keras.config.backend() == "torch" and not hasattr(model.train_function, "_halfstep_keeps"):
        model.train_function = _on_torch(keep, model, model.train_function)
    return result


def _on_torch(keep: Keep, model: Any, train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def step(data: Any) -> Any:
        pairs = [(each, keras.ops.copy(each.value.detach())) for each in variables_of(model)]
        keep(model, pairs, data[0])
        return train(data)

    step._halfstep_keeps = True  # type: ignore[attr-defined]
    return step


def _on_jax(
    original: Callable[..., Any], model: Any, function: Any, *args: Any, **kwargs: Any
) -> Any:
    keep = _making.keep
    if keep is None:
        return original(model, function, *args, **kwargs)

    def step(state: Any, data: Any) -> Any:
        # The step may write over its state.
        values = [keras.ops.copy(each) for each in (*state[0], *state[1])]
        keep(model, list(zip(variables_of(model), values, strict=True)), data)
        return function(state, data)

    return original(model, step, *args, **kwargs)


def _on_tensorflow(original: Callable[..., Any], model: Any, function: Any) -> Any:
    keep = _making.keep
    if keep is None:
        return original(model, function)

    def step(data: Any) -> Any:
        # Replicas have a value each.
        if not tf.distribute.has_strategy():
            _tell_later(keep, model, data)
        return function(data)

    return original(model, step)


def _tell_later(keep: Keep, model: Any, data: Any) -> None:
    """Calls `keep` whenever the graph runs that is being made, if one is."""
    variables, leaves = variables_of(model), tf.nest.flatten(data, expand_composites=True)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]

    def tell(*tensors: Any) -> None:
        here: list[Any] = [None] * len(leaves)
        for place, tensor in zip(places, tensors[len(variables) :], strict=True):
            here[place] = tensor
        batch = tf.nest.pack_sequence_as(data, here, expand_composites=True)
        keep(model, list(zip(variables, tensors, strict=False)), batch)

    values = [tf.convert_to_tensor(each.value) for each in variables]
    tf.py_function(tell, [*values, *_at(leaves, places)], [])


def _at(leaves: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [leaves[place] for place in places]


_INSIDE: dict[str, dict[str, Callable[..., Any]]] = {
    "jax": {"_make_function": _on_jax},
    "tensorflow": {"_autoconvert_optionals": _on_tensorflow},
}
