"""Loops and branches. What a loop carries keeps its dtype: each turn hands it to the next."""

from collections.abc import Sequence
from typing import Any

from halfstep.jax._interpret._context import Context
from halfstep.jax._interpret._interpreter import handles
from halfstep.jax._interpret._rewrite import rewrite, wanted_dtypes
from halfstep.jax._interpret._values import UNKNOWN, Value, widest
from halfstep.jax._private import bind


@handles("scan")
def run_scan(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Runs a loop over the first axis of arrays."""
    params = equation.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    body = params["jaxpr"]
    consts, slices = operands[:first], operands[last:]
    carry = _carried(operands[first:last], body.in_avals[first:last])
    wanted = wanted_dtypes(body.out_avals[: len(carry)])
    wanted += [None] * (len(body.out_avals) - len(carry))
    together = [*consts, *carry, *slices]
    inner = rewrite(body, together, context.inside(equation), wanted)
    out = bind(equation, [each.array for each in together], jaxpr=inner.closed)
    return [Value(each) for each in out]


@handles("while")
def run_while(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Runs a loop that ends by a condition."""
    params, context = equation.params, context.inside(equation)
    tested, looped = params["cond_jaxpr"], params["body_jaxpr"]
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    carry = _carried(operands[last:], looped.in_avals[params["body_nconsts"] :])
    test = rewrite(tested, [*operands[:first], *carry], context)
    body = rewrite(
        looped, [*operands[first:last], *carry], context, wanted_dtypes(looped.out_avals)
    )
    arrays = [each.array for each in (*operands[:last], *carry)]
    out = bind(equation, arrays, cond_jaxpr=test.closed, body_jaxpr=body.closed)
    return [Value(each) for each in out]


@handles("cond")
def run_cond(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Runs one of several programs, which hand on the same dtypes."""
    index, *given = operands
    context, branches = context.inside(equation), equation.params["branches"]
    dtypes = [rewrite(branch, given, context).dtypes for branch in branches]
    wanted = [
        None if each is None else widest(found)
        for each, *found in zip(wanted_dtypes(branches[0].out_avals), *dtypes, strict=True)
    ]
    # Told of already.
    quiet = context.quiet()
    closed = tuple(rewrite(branch, given, quiet, wanted).closed for branch in branches)
    out = bind(equation, [index.array, *(each.array for each in given)], branches=closed)
    return [Value(each) for each in out]


def _carried(operands: Sequence[Value], avals: Sequence[Any]) -> list[Value]:
    """Returns what a loop starts from, in the dtypes that it was written for."""
    pairs = zip(operands, wanted_dtypes(avals), strict=True)
    return [
        Value(each.array if dtype is None else each.in_(dtype), UNKNOWN) for each, dtype in pairs
    ]
