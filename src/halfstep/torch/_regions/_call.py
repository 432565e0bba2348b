"""One call of a region: which scale is in its gradients while a backward pass runs through it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from halfstep.torch import _private
from halfstep.torch._regions._factor import Factors, choose
from halfstep.torch._regions._state import Cells


class Call:
    """One forward of a region.

    The scale belongs to a backward pass, not to the call: a graph that is kept can be gone through
    again, with other gradients. The first gradient of a pass to enter the region chooses it.

    Args:
        cells: The state of the region's scale, on its device.
        rule: How that state moves, as text.
    """

    def __init__(self, cells: Cells, rule: str) -> None:
        self.cells = cells
        # Whose call it is, where it may have to be computed again.
        self.module: Callable[[], nn.Module | None] | None = None
        # Which hook was given what has crossed the boundary at a node.
        self.hooks: dict[Any, int] = {}
        # Whether what leaves at the moment is added to the gradients of parameters.
        self.accumulates = True
        # What has entered, while it is being traced.
        self.entered: list[Tensor] = []
        self._rule = rule
        self._scales = True
        # The passes that are in the call, with their factors; one may run within another.
        self._passes: list[tuple[int, Factors]] = []

    def begin(self, gradients: Sequence[Tensor], factor: Tensor | None) -> Tensor | None:
        """Returns what gradients that enter are multiplied by, in the present pass.

        Args:
            gradients: What is about to enter.
            factor: What they are going to be multiplied by anyway.
        """
        if not self._scales:
            return None
        current = _private.backward_pass()
        if not self._passes or self._passes[-1][0] != current:
            entry = current, choose(self.cells, self._rule, gradients, factor)
            self._passes.append(entry)
            _private.at_end_of_pass(lambda: self._end(entry))
        return self._passes[-1][1][0]

    def _end(self, entry: tuple[int, Factors]) -> None:
        while entry in self._passes:
            self._passes.pop()

    def end_scaling(self) -> None:
        """Lets gradients cross the boundary as they are."""
        self._scales = False

    def factors(self) -> Factors:
        """Returns what gradients inside are multiplied by, and its inverse; None for not at all.

        A pass within a pass, as of a checkpoint, has no factor of its own.
        """
        return self._passes[-1][1] if self._passes else (None, None)


class _Local(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []


_LOCAL = _Local()


def push(call: Call) -> None:
    """Makes a call the innermost one of this thread."""
    _LOCAL.calls.append(call)


def pop() -> None:
    """Ends the innermost call of this thread."""
    _LOCAL.calls.pop()


def current() -> Call:
    """Returns the innermost call of this thread."""
    return _LOCAL.calls[-1]


def calls() -> tuple[Call, ...]:
    """Returns the calls of this thread, the outermost first."""
    return tuple(_LOCAL.calls)
