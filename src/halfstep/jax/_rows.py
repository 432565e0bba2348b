"""Rows about operations: what each runs in, and why."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import numpy as jnp

from halfstep.jax._interpret import Decision, Value
from halfstep.jax._ops import MOVING, operation_name, plain_name


@dataclass(frozen=True)
class OperationRow:
    """Operations of a function that are alike.

    Args:
        operation: Such as `lax::dot_general`.
        module: The dotted path of the module, by the scopes that it opened; empty for none.
        shapes: The shapes of its operands.
        inputs: The dtypes in which its operands arrived.
        runs_in: The dtype that it runs in.
        outputs: The dtypes of its results.
        action: What the rules say, "as written" where they have no say, or "gradient" for what
            JAX makes of an operation to differentiate it.
        reason: Why.
        count: How often; the body of a loop counts once.

    Example:
        >>> shapes, floats = ((2, 2),), ("float32",)
        >>> row = OperationRow("lax::exp", "", shapes, floats, "float32", floats, "full", "Grows.")
        >>> row.count
        1
    """

    operation: str
    module: str
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[str, ...]
    runs_in: str
    outputs: tuple[str, ...]
    action: str
    reason: str
    count: int = 1


def rows_of(
    equation: Any,
    module: str,
    operands: Sequence[Value],
    results: Sequence[Value],
    decision: Decision,
) -> list[OperationRow]:
    """Returns the row of an operation, or none where it only moves values."""
    if plain_name(equation.primitive.name) in MOVING and decision.action == "keep":
        return []
    inputs, outputs = ([each.dtype for each in values] for values in (operands, results))
    return [_row(equation, module, inputs, outputs, decision)]


def row_in_place(equation: Any, module: str, action: str, reason: str) -> list[OperationRow]:
    """Returns the row of an operation as it stands in a program, or none without real numbers."""
    inputs, outputs = (
        [var.aval.dtype for var in atoms] for atoms in (equation.invars, equation.outvars)
    )
    if not any(map(_is_real, inputs)):
        return []
    return [_row(equation, module, inputs, outputs, Decision(action, reason))]


def _row(
    equation: Any, module: str, inputs: Sequence[Any], outputs: Sequence[Any], decision: Decision
) -> OperationRow:
    real = [str(each) for each in inputs if _is_real(each)]
    return OperationRow(
        operation=operation_name(equation.primitive.name),
        module=module,
        shapes=tuple(var.aval.shape for var in equation.invars),
        inputs=tuple(real),
        runs_in=_ran_in(equation, real, decision),
        outputs=tuple(map(str, outputs)),
        action=decision.action,
        reason=decision.reason,
    )


def _ran_in(equation: Any, arrived: Sequence[str], decision: Decision) -> str:
    if decision.dtype is not None:
        return np.dtype(decision.dtype).name
    if decision.action == "as written":
        dtypes = (var.aval.dtype for var in equation.invars if hasattr(var.aval, "dtype"))
        return " ".join(dict.fromkeys(str(each) for each in dtypes if _is_real(each)))
    return " ".join(dict.fromkeys(arrived))


def _is_real(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))
