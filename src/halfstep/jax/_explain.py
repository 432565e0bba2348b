"""Which operation of a function runs in which dtype, and why."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from halfstep.core import Policy
from halfstep.errors import UsageError
from halfstep.jax import _tracing
from halfstep.jax._arguments import is_real, traced
from halfstep.jax._autocast import lowered, parts, uncast
from halfstep.jax._interpret import Context, Decision, Value, context_of
from halfstep.jax._ops import MOVING, operation_name, plain_name
from halfstep.jax._unmatched import warn_of_unmatched

_HEADER = ("operation", "module", "count", "shapes", "in", "runs in", "out", "rule", "why")


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
        action: What the rules say, or "as written" where they have no say.
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


@dataclass(frozen=True)
class Explanation:
    """What the operations of a function run in; made by `explain`.

    Print it for a table.

    Args:
        rows: The operations, in the order in which they first run.

    Example:
        >>> shapes, floats = ((2, 2),), ("float32",)
        >>> row = OperationRow("lax::exp", "", shapes, floats, "float32", floats, "full", "Grows.")
        >>> print(Explanation((row,)))
        operation  module  count  shapes  in       runs in  out      rule  why
        lax::exp   -       1      2x2     float32  float32  float32  full  Grows.
        1 in float32
    """

    rows: tuple[OperationRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns the rows as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [_HEADER, *map(_cells, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        body = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        counts: Counter[str] = Counter()
        for row in self.rows:
            counts[row.runs_in] += row.count
        total = ", ".join(f"{count} in {dtype}" for dtype, count in counts.items())
        return "\n".join([*body, total or "nothing is cast"])


def explain(
    function: Callable[..., Any],
    /,
    *args: Any,
    policy: Policy | str | None = None,
    **kwargs: Any,
) -> Explanation:
    """Returns which operation of a function runs in which dtype, and why.

    The function is traced, not run. Operations that only move values are not listed.

    Args:
        function: The function, with or without `autocast`.
        args: What it is called with, or `jax.ShapeDtypeStruct` in place of arrays.
        policy: The policy, or its text form. Default: that of a function that `autocast` made, and
            "mixed_bfloat16" for any other.
        kwargs: The arguments by name.

    Raises:
        PolicyError: The policy cannot be read, or has no meaning in JAX.
        UsageError: A policy is given for a function that has one.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> inputs = jax.ShapeDtypeStruct((8, 4), jnp.float32)
        >>> weights = jax.ShapeDtypeStruct((4, 2), jnp.float32)
        >>> rows = explain(lambda x, w: jnp.exp(x @ w), inputs, weights).rows
        >>> [(row.operation, row.runs_in, row.action) for row in rows]
        [('lax::dot_general', 'bfloat16', 'lower'), ('lax::exp', 'float32', 'full')]
    """
    function, chosen = _asked(function, policy)
    called, owner = parts(function)
    with _tracing.inside():
        program = traced(called, ((*owner, *args), kwargs), _is_operand)
    warn_of_unmatched(program.closed.jaxpr, chosen.rules)
    found: Counter[OperationRow] = Counter()
    context = replace(context_of(chosen), note=lambda *told: found.update(_rows(*told)))
    jax.make_jaxpr(_runner(program.closed, chosen, context))(*program.operands)
    return Explanation(tuple(replace(row, count=count) for row, count in found.items()))


def _asked(function: Any, policy: Policy | str | None) -> tuple[Any, Policy]:
    """Returns a function without `autocast`, and the policy that it is explained with."""
    if not callable(function):
        raise UsageError(
            f"explain needs a function, got {function!r}. Write explain(function, *arguments),"
            " without calling the function."
        )
    plain, own = uncast(function)
    if own is None:
        return plain, Policy.of("mixed_bfloat16" if policy is None else policy)
    if policy is not None:
        raise UsageError(
            "explain needs no policy for a function that autocast made, got"
            f" policy={str(policy)!r} beside its own, {str(own)!r}. Leave it out, or write"
            " explain(function.__wrapped__, ..., policy=...)."
        )
    return plain, own


def _runner(closed: Any, policy: Policy, context: Context) -> Callable[..., Sequence[Any]]:
    run = lowered(closed, policy, context)
    return lambda *operands: run(*closed.consts, *operands)


def _is_operand(leaf: Any) -> bool:
    return is_real(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _rows(
    equation: Any,
    module: str,
    operands: Sequence[Value],
    results: Sequence[Value],
    decision: Decision,
) -> list[OperationRow]:
    """Returns the row of an operation, or none where it only moves values."""
    name = equation.primitive.name
    if plain_name(name) in MOVING and decision.action == "keep":
        return []
    real = [each for each in operands if _is_real_dtype(each.dtype)]
    row = OperationRow(
        operation=operation_name(name),
        module=module,
        shapes=tuple(var.aval.shape for var in equation.invars),
        inputs=tuple(str(each.dtype) for each in real),
        runs_in=_ran_in(equation, real, decision),
        outputs=tuple(str(each.dtype) for each in results),
        action=decision.action,
        reason=decision.reason,
    )
    return [row]


def _ran_in(equation: Any, real: Sequence[Value], decision: Decision) -> str:
    if decision.dtype is not None:
        return np.dtype(decision.dtype).name
    if decision.action == "as written":
        dtypes = (var.aval.dtype for var in equation.invars if hasattr(var.aval, "dtype"))
        return " ".join(dict.fromkeys(str(each) for each in dtypes if _is_real_dtype(each)))
    return " ".join(dict.fromkeys(str(each.dtype) for each in real))


def _is_real_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def _cells(row: OperationRow) -> tuple[str, ...]:
    shapes = " ".join("x".join(map(str, shape)) or "1" for shape in row.shapes)
    dtypes = (" ".join(dict.fromkeys(names)) or "-" for names in (row.inputs, row.outputs))
    arrived, out = dtypes
    names = (row.operation, row.module or "-", str(row.count), shapes or "-", arrived)
    return (*names, row.runs_in or "-", out, row.action, row.reason)
