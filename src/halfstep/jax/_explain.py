"""Which operation of a function runs in which dtype, and why."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax

from halfstep.core import Auto, Policy
from halfstep.errors import UsageError
from halfstep.jax import _tracing
from halfstep.jax._arguments import Traced, is_real, traced
from halfstep.jax._auto import asked_policy, settled
from halfstep.jax._autocast import is_cast, lowered, parts, uncast
from halfstep.jax._interpret import Context, context_of
from halfstep.jax._ran import ran
from halfstep.jax._rows import OperationRow, rows_of
from halfstep.jax._unmatched import warn_of_unmatched

_HEADER = ("operation", "module", "count", "shapes", "in", "runs in", "out", "rule", "why")


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

    The function is traced, not run. Operations that only move values are not listed. A function
    that calls what `autocast` made, as its gradient does, is shown as it runs, with the operations
    of the gradient, which run in the dtypes of those that they belong to.

    Args:
        function: The function, with or without `autocast`, such as `jax.grad(autocast(loss))`.
        args: What it is called with, or `jax.ShapeDtypeStruct` in place of arrays.
        policy: The policy, or its text form. Default: those of the functions that `autocast` made,
            and "mixed_bfloat16" where there are none.
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
    trace = partial(traced, called, ((*owner, *args), kwargs), _is_operand)
    running = ran(trace) if chosen is None else None
    if running is not None:
        return _counted(running)
    return _counted(_planned(trace, settled(chosen or Policy.named("mixed_bfloat16"))))


def _counted(rows: Iterable[OperationRow]) -> Explanation:
    found = Counter(rows)
    return Explanation(tuple(replace(row, count=count) for row, count in found.items()))


def _planned(trace: Callable[[], Traced], chosen: Policy) -> list[OperationRow]:
    """Returns what a function would run in under a policy."""
    with _tracing.inside():
        program = trace()
    warn_of_unmatched(program.closed.jaxpr, chosen.rules)
    found: list[OperationRow] = []
    context = replace(context_of(chosen), note=lambda *told: found.extend(rows_of(*told)))
    jax.make_jaxpr(_runner(program.closed, chosen, context))(*program.operands)
    return found


def _asked(function: Any, policy: Policy | str | None) -> tuple[Any, Policy | Auto | None]:
    """Returns a function without `autocast`, and the policy to explain it with, if any."""
    if not callable(function):
        raise UsageError(
            f"explain needs a function, got {function!r}. Write explain(function, *arguments),"
            " without calling the function."
        )
    plain, own = uncast(function)
    if policy is None:
        return plain, own
    if own is not None or is_cast(function):
        raise UsageError(
            "explain needs no policy for a function that autocast made, got"
            f" policy={str(policy)!r} beside its own{own and f', {str(own)!r}'}. Leave it out, or"
            " write explain(function.__wrapped__, ..., policy=...)."
        )
    return plain, asked_policy(policy)


def _runner(closed: Any, policy: Policy, context: Context) -> Callable[..., Sequence[Any]]:
    run = lowered(closed, policy, context)
    return lambda *operands: run(*closed.consts, *operands)


def _is_operand(leaf: Any) -> bool:
    return is_real(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def _cells(row: OperationRow) -> tuple[str, ...]:
    shapes = " ".join("x".join(map(str, shape)) or "1" for shape in row.shapes)
    dtypes = (" ".join(dict.fromkeys(names)) or "-" for names in (row.inputs, row.outputs))
    arrived, out = dtypes
    names = (row.operation, row.module or "-", str(row.count), shapes or "-", arrived)
    return (*names, row.runs_in or "-", out, row.action, row.reason)
