"""Whose gradients were not finite, counted where the step is skipped."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy
from keras import ops

from halfstep.core import Culprits
from halfstep.keras._stepping._backend import backend
from halfstep.keras._stepping._skips import path_of

_KINDS = ("inf", "nan")


class Tally:
    """Counts for each variable the skipped steps in which its gradient held inf, and nan.

    The numbers are a variable of the optimizer, because nothing else leaves a compiled step. Only
    steps that are skipped look for them. On several replicas they are those of the first one.

    Args:
        optimizer: The optimizer that owns the variable.
        variables: The variables that it trains.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        self._paths = [path_of(variable) for variable in variables]
        self._row = optimizer._get_variable_index
        shape = (len(variables), len(_KINDS))
        self.found = optimizer.add_variable(shape, dtype="int", name="nonfinite")

    def note(self, received: Sequence[tuple[Any, Any]]) -> None:
        """Counts a skipped step, from pairs of a gradient and its variable."""
        held = {self._row(variable): _held(grad) for grad, variable in received}
        nothing = ops.zeros((len(_KINDS),), "bool")
        rows = [held.get(row, nothing) for row in range(len(self._paths))]
        self.found.assign_add(ops.cast(ops.stack(rows), self.found.dtype))

    def read(self) -> numpy.ndarray[Any, Any]:
        """Returns the counts on the host: a row for each variable."""
        return numpy.asarray(backend().host(self.found.value))

    def culprits(self, counts: Any) -> Culprits:
        """Returns the path of each variable with a count, and what its gradients held.

        Args:
            counts: What `read` returned, or the difference between two of them.
        """
        kinds = [_words(row) for row in counts]
        pairs = zip(self._paths, kinds, strict=True)
        return tuple((path, kind) for path, kind in pairs if kind)


class Witness:
    """A cell that also tells the tally about a skipped step.

    Args:
        cell: The cell of the loss scale.
        note: What to call when the step is skipped.
    """

    def __init__(self, cell: Any, note: Callable[[], None]) -> None:
        self.grow = cell.grow
        self._cell = cell
        self._note = note

    def back_off(self) -> None:
        """Counts a step that is not finite, and whose gradients were not."""
        # The gradients are divided by the scale that they were taken with.
        self._note()
        self._cell.back_off()


def _held(grad: Any) -> Any:
    values = backend().values(grad)
    return ops.stack([ops.any(ops.isinf(values)), ops.any(ops.isnan(values))])


def _words(row: Any) -> str:
    return " and ".join(kind for kind, count in zip(_KINDS, row, strict=True) if count > 0)
