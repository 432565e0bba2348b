"""The gradients that arrive at the layers of a model while it runs backward."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from halfstep.keras._diagnosing._backend import here
from halfstep.keras._diagnosing._hooks import following, functions, undoing
from halfstep.keras._diagnosing._numbers import Numbers, all_numbers, bad, numbers
from halfstep.keras._diagnosing._places import Place, Places
from halfstep.keras._diagnosing._words import UNWRITTEN, function_word, operation_word
from halfstep.keras._private import backend
from halfstep.keras._wide import remember


@dataclass(frozen=True)
class Arrived:
    """A gradient that arrived.

    Args:
        place: The call of a layer, or of a function of Keras' backend in one.
        role: "grad_output", "grad_input" or "grad_weight".
        numbers: The gradient.
        operation: What made it not finite since the one before, as far as it was seen.
    """

    place: Place
    role: str
    numbers: Numbers
    operation: str


class Arrivals:
    """The gradients that arrived so far.

    Args:
        places: Where the model is while it runs forward.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.arrived: list[Arrived] = []
        self._operation = ""
        self._begun = False

    def begin(self) -> None:
        """From now on, what runs is the way back."""
        self._begun = True

    def operation(self, name: str, inputs: Any, outputs: Any) -> None:
        """Takes note of the operation that made something not finite."""
        if not self._begun or not self.places.here or self._operation:
            return
        with self.places.paused():
            word = operation_word(name)
            made = bad(all_numbers(outputs)) and not bad(all_numbers(inputs))
            self._operation = word if made and word not in UNWRITTEN else ""

    def take(self, place: Place, role: str, grad: Any) -> None:
        """Takes note of a gradient."""
        with self.places.paused():
            found = numbers(grad)
        if found is not None:
            self.arrived.append(Arrived(place, role, found, self._operation))
            if found.finite:
                self._operation = ""

    def probed(self, place: Place, role: str, values: Any) -> Any:
        """Returns tensors whose gradients are noted when they arrive."""
        return keras.tree.map_structure(lambda each: self._probed(place, role, each), values)

    def _probed(self, place: Place, role: str, value: Any) -> Any:
        if isinstance(value, keras.Variable):
            return self._probed(place, "grad_weight", value.value) if _floats(value) else value
        if not backend.is_tensor(value) or not _floats(value):
            return value

        def probe(each: Any) -> Any:
            return here().probe(each, lambda grad: self.take(place, role, grad))

        result = probe(value)
        _carry(value, result, probe)
        return result

    def function(self, place: Place, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of Keras' backend, whose gradients are noted."""
        inner = Place(place.path, function_word(name), parent=place)
        args, kwargs = self.probed(inner, "grad_input", (args, kwargs))
        return self.probed(inner, "grad_output", call(*args, **kwargs))


def _floats(value: Any) -> bool:
    return bool(backend.is_float_dtype(backend.standardize_dtype(value.dtype)))


def _carry(value: Any, result: Any, probe: Callable[[Any], Any]) -> None:
    """Gives a tensor what Keras and halfstep have put onto the one that it is a copy of."""
    mask = backend.get_keras_mask(value)
    if mask is not None:
        backend.set_keras_mask(result, mask)
    remember(value, result, probe)
    if hasattr(value, "_keras_logits"):
        result._keras_logits = probe(value._keras_logits)


@contextlib.contextmanager
def probing(arrivals: Arrivals) -> Iterator[None]:
    """Lets `arrivals` see the gradients of every layer that runs until the block ends."""

    def around(place: Place, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = arrivals.probed(place, "grad_input", (args, kwargs))
        return arrivals.probed(place, "grad_output", call(*args, **kwargs))

    layers = following(arrivals.places, around)
    with undoing(itertools.chain(layers, functions(arrivals.places, arrivals.function))):
        yield
