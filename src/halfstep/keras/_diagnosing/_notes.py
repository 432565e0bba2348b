"""Which operations made what is not finite, while a model ran forward."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from halfstep.core import Format
from halfstep.keras._diagnosing._numbers import Numbers, all_numbers, bad, kind, largest
from halfstep.keras._diagnosing._places import Place, Places
from halfstep.keras._diagnosing._words import CONTAINERS, UNWRITTEN, function_word, operation_word
from halfstep.keras._policies import LOW

_BY_HAND = ("add", "subtract", "multiply", "divide")


@dataclass(frozen=True, eq=False)
class Made:
    """An operation that made something not finite.

    Args:
        place: The layer call that it ran in.
        operation: Its word.
        nth: How often it ran in this call before.
        role: What holds it.
        held: What was made.
        largest: The largest finite magnitude that went in, None if nothing finite did.
        fresh: Whether everything that went in was finite.
        written: The number of largest magnitude that somebody wrote; inf where the backend has
            cast it already.
        zero: Whether a zero went in.
    """

    place: Place
    operation: str
    nth: int
    role: str
    held: Numbers
    largest: float | None
    fresh: bool = True
    written: float = 0.0
    zero: bool = False

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What is the same in a run of the model in another format, which casts less."""
        nth = 0 if self.operation == "cast" else self.nth
        return self.place.path, self.place.call, self.operation, nth

    @property
    def kind(self) -> str:
        """What was made, in words."""
        return kind(self.held)

    @property
    def masks(self) -> bool:
        """Whether it is what masks are made of, perhaps of a number below the format's."""
        low = Format.named(self.held.dtype).max < abs(self.written)
        return self.held.only_minus_inf and (self.operation == "where" or low)


class Notes:
    """What is noted while a model runs.

    Args:
        places: Where it is.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.made: list[Made] = []

    def operation(self, name: str, inputs: Any, outputs: Any) -> None:
        """Takes note of an operation of the backend that no function of Keras is made of."""
        place = self.places.now
        word = operation_word(name)
        if place is None or place.atomic or (place.told and word in CONTAINERS):
            return
        with self.places.paused():
            self._note(place, word, inputs, outputs)

    def function(self, place: Place, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function of Keras' backend and takes note of it as a whole."""
        result = call(*args, **kwargs)
        with self.places.paused():
            self._note(place, function_word(name), (args, kwargs), result)
        return result

    def weight(self, stored: Any, read: Any) -> None:
        """Takes note of a weight that is read in the dtype that a layer computes in."""
        place = self.places.now
        if place is not None and stored is not read:
            with self.places.paused():
                self._note(place, "cast", stored, read, role="weight")

    def layer(self, place: Place, inputs: Any, outputs: Any) -> None:
        """Takes note of a layer in which nothing was noted, such as one that is compiled."""
        if not place.told and self.places.here:
            with self.places.paused():
                word = type(place.layer).__name__.lower()
                self._note(place, word, (inputs, _weights(place.layer)), outputs)

    def _note(self, place: Place, word: str, inputs: Any, outputs: Any, role: str = "") -> None:
        nth = place.count[word]
        place.count[word] += 1
        held = bad(all_numbers(outputs))
        if held is None or word in UNWRITTEN:
            return
        went_in = all_numbers(inputs)
        scalar = all(each.constant for each in went_in)
        if not went_in or (word == "cast" and scalar and not role):
            return
        fresh = bad(_relevant(word, went_in, held)) is None
        if fresh or _new_nan(went_in, held):
            role = role or ("output" if place.inside or word != "cast" else "input")
            zero = any((each.values == 0).any() for each in went_in)
            size, written = largest(went_in), _written(inputs, went_in)
            self.made.append(Made(place, word, nth, role, held, size, fresh, written, zero))
            place.tell()


def _relevant(word: str, went_in: Sequence[Numbers], held: Numbers) -> list[Numbers]:
    """Returns what must be finite; a number that somebody wrote may have become inf when cast."""
    tensors = [each for each in went_in if not each.constant]
    return tensors if tensors and word in _BY_HAND and held.dtype in LOW else list(went_in)


def _new_nan(went_in: Sequence[Numbers], held: Numbers) -> bool:
    return "nan" in kind(held) and not any("nan" in kind(each) for each in went_in)


def _written(inputs: Any, went_in: Sequence[Numbers]) -> float:
    flat = keras.tree.flatten(inputs)
    by_python = [float(each) for each in flat if isinstance(each, (int, float, np.floating))]
    cast = [float(each.values) for each in went_in if each.constant and not each.finite]
    return max([*by_python, *cast], key=abs, default=0.0)


def _weights(layer: Any) -> list[Any]:
    return list(getattr(layer, "_trainable_variables", ()))
