"""The gradients that arrive at the layers of a model while it runs backward."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from halfstep.keras._diagnosing._backend import here
from halfstep.keras._diagnosing._hooks import following, undoing
from halfstep.keras._diagnosing._numbers import Numbers, all_numbers, bad, numbers
from halfstep.keras._diagnosing._places import Place, Places
from halfstep.keras._private import backend


@dataclass(frozen=True)
class Arrived:
    """A gradient that arrived.

    Args:
        place: The layer call.
        role: "grad_output" or "grad_input".
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
            if bad(all_numbers(outputs)) and not bad(all_numbers(inputs)):
                self._operation = here().WORDS.get(name, name.strip("_").lower())

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
        if not backend.is_tensor(value) or not backend.is_float_dtype(value.dtype):
            return value
        mask = backend.get_keras_mask(value)
        result = here().probe(value, lambda grad: self.take(place, role, grad))
        if mask is not None:
            backend.set_keras_mask(result, mask)
        return result


@contextlib.contextmanager
def probing(arrivals: Arrivals) -> Iterator[None]:
    """Lets `arrivals` see the gradients of every layer that runs until the block ends."""

    def around(place: Place, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        args, kwargs = arrivals.probed(place, "grad_input", (args, kwargs))
        return arrivals.probed(place, "grad_output", call(*args, **kwargs))

    with undoing(following(arrivals.places, around)):
        yield
