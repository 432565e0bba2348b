"""Changes of Keras that let `Notes` see a run, and end with it."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from halfstep.core import replace
from halfstep.keras._diagnosing._backend import here
from halfstep.keras._diagnosing._notes import Notes
from halfstep.keras._diagnosing._places import Place, Places
from halfstep.keras._patches import Undo
from halfstep.keras._private import Layer, Operation, backend, found

_OPERATORS = {
    "add": "add",
    "sub": "subtract",
    "mul": "multiply",
    "truediv": "divide",
    "pow": "power",
}
_MODULES = ("backend.numpy", "backend.nn", "backend.math", "backend.linalg", "backend.random")

Around = Callable[[Place, Callable[..., Any], Any, Any], Any]


@contextlib.contextmanager
def undoing(changes: Iterator[Undo]) -> Iterator[None]:
    """Makes changes, and undoes them when the block ends, however it does."""
    with contextlib.ExitStack() as stack:
        for undo in changes:
            stack.callback(undo)
        yield


def following(places: Places, around: Around) -> Iterator[Undo]:
    """Follows the calls of layers; `around(place, call, args, kwargs)` runs what is in each."""

    def enter(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        if not places.here or _symbolic(args, kwargs):
            return original(layer, *args, **kwargs)
        with places.entered(layer, layer.name):
            return original(layer, *args, **kwargs)

    def inside(original: Callable[..., Any], operation: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, operation)
        if places.now is None or _symbolic(args, kwargs):
            return call(*args, **kwargs)
        if isinstance(operation, Layer):
            return around(places.now, call, args, kwargs)
        with places.entered(operation, operation.name) as place:
            return around(place, call, args, kwargs)

    yield replace(Layer, "__call__", enter)
    yield replace(Operation, "__call__", inside)


@contextlib.contextmanager
def noting(notes: Notes) -> Iterator[None]:
    """Takes note of what a model does until the block ends."""
    with undoing(_changes(notes)), here().watching(notes.operation):
        yield


def _changes(notes: Notes) -> Iterator[Undo]:
    def around(place: Place, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place.inside = True
        outputs = call(*args, **kwargs)
        notes.layer(place, (args, kwargs), outputs)
        return outputs

    def read(original: Callable[..., Any], variable: Any, value: Any) -> Any:
        if notes.places.now is None:
            return original(variable, value)
        with notes.places.paused():
            result = original(variable, value)
        notes.weight(value, result)
        return result

    yield from following(notes.places, around)
    yield from functions(notes.places, notes.function)
    yield from _operators(notes.places, notes.function)
    yield replace(keras.Variable, "_maybe_autocast", read)


def functions(places: Places, around: Callable[..., Any]) -> Iterator[Undo]:
    """Lets `around(place, name, call, args, kwargs)` run each function of Keras' backend.

    Those that another one calls are a part of it.
    """
    for module in map(found, _MODULES):
        for name in _functions(module):
            yield replace(module, name, _outermost(places, name, around))


def _operators(places: Places, around: Callable[..., Any]) -> Iterator[Undo]:
    """Lets `around` run each operator of tensors, with the number that somebody wrote."""
    for tensor in here().CASTS:
        for name, word in _OPERATORS.items():
            yield replace(tensor, f"__{name}__", _outermost(places, word, around))
            yield replace(tensor, f"__r{name}__", _outermost(places, word, around))


def _outermost(places: Places, name: str, around: Callable[..., Any]) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        place = places.now
        if place is None or place.atomic:
            return original(*args, **kwargs)
        place.atomic = True
        try:
            with here().whole():
                return around(place, name, original, args, kwargs)
        finally:
            place.atomic = False

    return call


def _functions(module: Any) -> list[str]:
    """Returns the names of the functions that a module of a backend defines for Keras."""
    own = inspect.getmembers(module, inspect.isfunction)
    return [name for name, each in own if each.__module__ == module.__name__ and name[0] != "_"]


def _symbolic(args: Any, kwargs: Any) -> bool:
    flat = keras.tree.flatten((args, kwargs))
    return any(isinstance(each, backend.KerasTensor) for each in flat)


@contextlib.contextmanager
def computing(dtype_of: Callable[[Any, str], str]) -> Iterator[None]:
    """Lets each layer compute in `dtype_of(layer, its own)` in this thread until the block ends."""
    original, thread = Layer.compute_dtype, threading.get_ident()

    def compute_dtype(layer: Any) -> str:
        own: str = original.fget(layer)
        return dtype_of(layer, own) if threading.get_ident() == thread else own

    Layer.compute_dtype = property(compute_dtype)
    try:
        yield
    finally:
        Layer.compute_dtype = original
