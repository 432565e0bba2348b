"""Which number comes out of an operation on constants, to know the dtypes that hold it."""

import contextlib
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.jax._interpret._values import FLOAT16, UNKNOWN, Origin, Value, constant, fits

_FUNCTIONS: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "max": max,
    "min": min,
    "sqrt": math.sqrt,
    "rsqrt": lambda number: 1.0 / math.sqrt(number),
    "exp": math.exp,
    "log": math.log,
    "pow": operator.pow,
    # One of them, so rather one that a low format does not hold.
    "select_n": lambda *numbers: min(numbers, key=lambda number: fits(number, FLOAT16)),
}


def folded(equation: Any, operands: Sequence[Value], name: str) -> Origin:
    """Returns the origin of a number that was computed from constants alone."""
    compute = _FUNCTIONS.get(name)
    operands = operands[1:] if name == "select_n" else operands
    if compute is None or any(each.origin.kind != "constant" for each in operands):
        return UNKNOWN
    # Not a number, or none that Python holds.
    with contextlib.suppress(ArithmeticError, ValueError, TypeError):
        return constant(compute(*(each.origin.number for each in operands)))
    return UNKNOWN
