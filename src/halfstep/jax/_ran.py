"""What the operations of a function run in that calls what `autocast` made, gradients included."""

from collections.abc import Callable, Iterator
from typing import Any

from halfstep.jax import _tracing
from halfstep.jax._arguments import Traced
from halfstep.jax._ops import FAMILY_OF, operation_name, plain_name
from halfstep.jax._primitives import linear_p
from halfstep.jax._private import is_of_gradient, scope, sub_jaxprs
from halfstep.jax._rows import OperationRow, row_in_place, rows_of

_OUTSIDE = "It is in no function that autocast made."
_PART = "It belongs to the gradient of {}."
_PART_OF_SOME = "It belongs to a gradient."


def ran(trace: Callable[[], Traced]) -> list[OperationRow] | None:
    """Returns what the operations of a function run in, None where none is in a region.

    Args:
        trace: Traces the function.
    """
    decided: dict[tuple[str, Any], OperationRow] = {}

    def note(equation: Any, *told: Any) -> None:
        decided.update((_key(equation), row) for row in rows_of(equation, *told))

    # What JAX has traced already is to be told of as well.
    with _tracing.noting(note), _tracing.afresh():
        program = trace()
    return list(_Running(decided).rows(program.closed.jaxpr)) if decided else None


def _key(equation: Any) -> tuple[str, Any]:
    # The equation that comes of another one keeps the line of that.
    return plain_name(equation.primitive.name), equation.source_info.traceback


class _Running:
    """A program as it runs, with what was decided of the operations of its regions.

    Args:
        decided: Their rows, by the names and lines of the operations.
    """

    def __init__(self, decided: dict[tuple[str, Any], OperationRow]) -> None:
        self._decided = decided
        self._lines = {line: name for name, line in reversed(decided)}

    def rows(self, jaxpr: Any, around: str = "", *, back: bool = False) -> Iterator[OperationRow]:
        """Yields a row for each operation.

        Args:
            jaxpr: The program.
            around: The dotted path of the module around it.
            back: Whether it is on the way back.
        """
        for equation in jaxpr.eqns:
            module = ".".join(filter(None, (around, scope(equation))))
            behind = back or is_of_gradient(equation) or equation.primitive is linear_p
            if plain_name(equation.primitive.name) in FAMILY_OF:
                yield from self._row(equation, module, back=behind)
                continue
            for inner in sub_jaxprs(equation.params):
                yield from self.rows(inner, module, back=behind)

    def _row(self, equation: Any, module: str, *, back: bool) -> Iterator[OperationRow]:
        known = None if back else self._decided.get(_key(equation))
        if known is not None:
            yield known
            return
        action, reason = self._why(equation, back=back)
        yield from row_in_place(equation, module, action, reason)

    def _why(self, equation: Any, *, back: bool) -> tuple[str, str]:
        name, line = _key(equation)
        of = name if (name, line) in self._decided else self._lines.get(line)
        if of is not None:
            return "gradient", _PART.format(operation_name(of))
        return ("gradient", _PART_OF_SOME) if back else ("as written", _OUTSIDE)
