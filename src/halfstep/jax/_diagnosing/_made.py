"""An inf or NaN, where it was made, and the values that hold it since."""

from dataclasses import dataclass
from typing import Any

from halfstep.jax._diagnosing._numbers import Numbers, numbers


@dataclass(frozen=True, eq=False)
class Made:
    """Something that is not finite, as it was made.

    Args:
        path: The scope of the equation, or the name of the argument.
        operation: The primitive; "cast" for a change of dtype, "data" for an argument.
        backward: Whether it was made on the way back.
        source: The line that somebody wrote.
        held: The numbers.
        largest: The largest finite magnitude that went in.
        region: Whether it was made in a function that `autocast` made.
        scale: What gradients are brought to there, 0.0 for none.
        meant: Whether somebody wrote it down, or a run forward made it and took it back.
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

    @property
    def key(self) -> tuple[str, str, str]:
        """What is the same in a run of the program in other formats."""
        return self.path, self.operation, self.source


@dataclass(frozen=True, eq=False)
class Value:
    """A value of a program while it runs.

    Args:
        array: The value.
        numbers: Its numbers, where it is not finite.
        origins: What made it so.
        varies: Whether it was computed of the arguments.
    """

    array: Any
    numbers: Numbers | None = None
    origins: frozenset[Made] = frozenset()
    varies: bool = False


def value(array: Any, origins: frozenset[Made] = frozenset(), *, varies: bool = False) -> Value:
    """Returns a value with the origins of what is not finite in it."""
    held = numbers(array)
    if held is None or held.finite:
        return Value(array, varies=varies)
    return Value(array, held, origins, varies)
