"""Where in a program something stands."""

from dataclasses import dataclass, replace
from typing import Any

from halfstep.jax._interpret import REGION
from halfstep.jax._private import is_of_gradient, scope, source


@dataclass(frozen=True)
class Place:
    """Where in a program an equation stands.

    Args:
        path: The dotted path of the scopes around it.
        backward: Whether what is around it is on the way back.
        region: Whether it is in a function that `autocast` made.
        line: The line that it came from, or else what is around it.
        scale: What gradients are brought to in the region around it, 0.0 for none.
        turn: In which turn of the loops around it, in words.
    """

    path: str = ""
    backward: bool = False
    region: bool = False
    line: str = ""
    scale: float = 0.0
    turn: str = ""

    def inside(self, equation: Any) -> "Place":
        """Returns the place of what stands in an equation."""
        path = ".".join(filter(None, (self.path, scope(equation))))
        region = self.region or equation.params.get("name") == REGION
        backward = self.backward or is_of_gradient(equation)
        line = source(equation) or self.line
        return replace(self, path=path, backward=backward, region=region, line=line)

    def at(self, turn: int, length: int | None = None) -> "Place":
        """Returns the place in a turn of a loop, counted from 0."""
        words = f"turn {turn + 1}" if length is None else f"turn {turn + 1} of {length}"
        return replace(self, turn=f"{self.turn}, {words}" if self.turn else words)
