"""The values of several steps, or turns of a loop, as those of one."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from halfstep.core._exponents import Exponents
from halfstep.core._range import Range
from halfstep.core._ranges import Ranges

_NOTHING: dict[str, Any] = {"reference": Exponents(), "run": Exponents()}


def summed(found: Iterable[Ranges]) -> Ranges:
    """Returns the sums of the counts of several steps; the rest is that of the last one.

    Args:
        found: The values of each step.

    Example:
        >>> values = Exponents.of([1.0, 4.0])
        >>> step = Ranges((Range("head", "output", values, values),))
        >>> summed([step, step]).rows[0].run.total
        4
    """
    rows: dict[tuple[str, str], Range] = {}
    last = Ranges()
    for last in found:
        for row in last.rows:
            before = rows.get((row.module, row.role), replace(row, **_NOTHING))
            added = {name: getattr(before, name) + getattr(row, name) for name in _NOTHING}
            rows[row.module, row.role] = replace(row, **added)
    return replace(last, rows=tuple(rows.values()))
