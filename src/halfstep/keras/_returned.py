"""The gradients that come back to the outputs of models, whatever a script makes of these."""

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from halfstep.keras._diagnosing._numbers import numbers
from halfstep.keras._patches import Undo
from halfstep.keras._private import backend

_BACKENDS = {name: f"_returned_on_{name}" for name in ("jax", "tensorflow", "torch")}


class Enough(Exception):
    """The models were called and have their gradients: what becomes of these does not matter."""


class Returned:
    """What comes back to the outputs of one call of a model.

    Args:
        outputs: The outputs.

    Example:
        >>> returned = Returned([keras.ops.ones(2), keras.ops.ones(2)])
        >>> returned.take(0, keras.ops.full((2,), 3.0))
        >>> returned.known, returned.finite
        (True, True)
        >>> loss = returned.loss(scale=2.0)
        >>> float(loss(None, [keras.ops.ones(2), keras.ops.ones(2)]))
        3.0
    """

    def __init__(self, outputs: Any) -> None:
        self._gradients: list[Any] = [None] * len(floats(outputs))

    def take(self, place: int, gradient: Any) -> None:
        """Takes the gradient of the output at a place among those of real numbers."""
        if gradient is not None:
            self._gradients[place] = gradient

    @property
    def known(self) -> bool:
        """Whether something came back."""
        return any(each is not None for each in self._gradients)

    @property
    def finite(self) -> bool:
        """Whether all of it is finite."""
        found = (numbers(each) for each in self._gradients if each is not None)
        return all(each is None or each.finite for each in found)

    def loss(self, scale: float) -> Callable[[Any, Any], Any]:
        """Returns a loss that hands the same back once it is multiplied by a scale."""

        def compare(_: Any, outputs: Any) -> Any:
            pairs = zip(floats(outputs), self._gradients, strict=True)
            products = [
                keras.ops.sum(keras.ops.cast(each, "float32") * _true(gradient, scale))
                for each, gradient in pairs
                if gradient is not None
            ]
            return sum(products)

        return compare


def _true(gradient: Any, scale: float) -> Any:
    return keras.ops.cast(gradient, "float32") / scale


def floats(outputs: Any) -> list[Any]:
    """Returns the tensors of real numbers in outputs."""
    flat = keras.tree.flatten(outputs)
    return [each for each in flat if hasattr(each, "dtype") and _is_float(each)]


def _is_float(value: Any) -> bool:
    return bool(backend.is_float_dtype(backend.standardize_dtype(value.dtype)))


def replaced(outputs: Any, change: Callable[[int, Any], Any]) -> Any:
    """Returns outputs of which `change(place, tensor)` takes the place of those of real numbers."""
    places = iter(range(len(floats(outputs))))

    def each(value: Any) -> Any:
        is_number = hasattr(value, "dtype") and _is_float(value)
        return change(next(places), value) if is_number else value

    return keras.tree.map_structure(each, outputs)


class _Local(threading.local):
    again = False  # while a script is run again, with variables that are none
    order: list[Returned] | None = None


local = _Local()


@contextlib.contextmanager
def running_again() -> Iterator[None]:
    """Says that what runs until the block ends is a step that was run before."""
    local.again = True
    try:
        yield
    finally:
        local.again = False


def is_again() -> bool:
    """Returns whether a step runs that was run before."""
    return local.again


def install() -> Iterator[Undo]:
    """Yields what undoes each change that lets gradients be seen."""
    yield from _here().install()


def watched(outputs: Any) -> tuple[Any, Returned]:
    """Returns outputs, and what will know of the gradients that come back to them."""
    returned = Returned(outputs)
    return _here().watched(outputs, returned), returned


def _here() -> Any:
    return importlib.import_module(f"halfstep.keras.{_BACKENDS[keras.config.backend()]}")
