"""An inf or NaN, where it was made, and the values that hold it since."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import numpy as jnp

from halfstep.jax._diagnosing._numbers import Numbers, numbers
from halfstep.jax._diagnosing._written import Written


@dataclass(frozen=True, eq=False)
class Made:
    """Something that is not finite, as it was made.

    Args:
        path: The scope of the equation, or the name of the argument.
        operation: The primitive; "cast" for a change of dtype or a number that was written,
            "data" for an argument.
        backward: Whether it was made on the way back.
        source: The line that somebody wrote.
        held: The numbers.
        largest: The largest finite magnitude that went in.
        region: Whether it was made in a function that `autocast` made.
        scale: What gradients are brought to there, 0.0 for none.
        meant: Whether somebody wrote it down, or a run forward made it and took it back.
        of: What was cast, if it has a name: an argument, or a number that was written.
        written: That number.
        held_by: What of the function holds it: "constant" or "input"; empty for a result.
        divisor: The number that was divided by, if it was written and has become 0.
        turn: In which turn of which loops it was made, in words.
    """

    path: str
    operation: str
    backward: bool
    source: str
    held: Numbers
    largest: float
    region: bool = False
    scale: float = 0.0
    meant: bool = False
    of: str = ""
    written: Written | None = None
    held_by: str = ""
    divisor: Written | None = None
    turn: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What is the same in a run of the program in other formats."""
        word = f"{self.operation} of {self.of}" if self.written else self.operation
        return self.path, word, self.source


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a program while it runs.

    Args:
        array: The value.
        numbers: Its numbers, where it is not finite.
        origins: What made it so.
        varies: Whether it was computed of the arguments.
        name: What it is called, where it is a part of an argument.
        wide: Whether it is in float32 where the program has a lower format.
        maker: What made it, and whether on the way back, if that was no operation of halfstep.
        constant: Whether it stands in the program.
        written: What was written, where its format cannot hold that.
    """

    array: Any
    numbers: Numbers | None = None
    origins: frozenset[Made] = frozenset()
    varies: bool = False
    name: str = ""
    wide: bool = False
    maker: tuple[tuple[str, str, str], bool] | None = None
    constant: bool = False
    written: Written | None = None


def value(array: Any, origins: frozenset[Made] = frozenset(), **known: Any) -> Value:
    """Returns a value with the origins of what is not finite in it.

    Args:
        array: The value.
        origins: What made it so, if it is.
        known: What else there is to know of it.
    """
    held = numbers(array)
    if held is None or held.finite:
        return Value(array, origins=frozenset() if held else origins, **known)
    return Value(array, held, origins, **known)


def mended(array: Any) -> Any:
    """Returns an array with 0 for what is not finite."""
    held = numbers(array)
    return array if held is None else jnp.where(jnp.isfinite(array), array, jnp.zeros_like(array))


def chosen(operands: list[Value]) -> list[Value]:
    """Returns those operands of a selection of whose bad numbers one was selected."""
    which, *cases = operands
    index = np.asarray(which.array).astype(int)
    return [
        each
        for number, each in enumerate(cases)
        if each.numbers and (~np.isfinite(each.numbers.values) & (index == number)).any()
    ]
