"""Calls of other programs: `jit`, `checkpoint`, `shard_map`, and changes of dtype."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr

from halfstep.jax._interpret._context import Context, Decision
from halfstep.jax._interpret._interpreter import handles, interpret
from halfstep.jax._interpret._operation import as_written, noted
from halfstep.jax._interpret._rewrite import rewrite
from halfstep.jax._interpret._values import ELIGIBLE, UNKNOWN, Value, constant
from halfstep.jax._private import bind, located, manual_axes, without_consts

# The name of the call that a region inside another one makes, which has rules of its own.
REGION = "halfstep_region"
_ASKED = "The program itself asks for this dtype."
_OWN = "It is a region with a policy of its own."


def _closed(jaxpr: Any) -> Any:
    return ClosedJaxpr(jaxpr, ())


def _arrays(operands: Sequence[Value]) -> list[Any]:
    return [each.array for each in operands]


@handles("jit", "pjit")
def run_jit(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Calls what `jit` holds on operands in the dtypes that they have by now."""
    if equation.params["name"] == REGION:
        return as_written(equation, operands, context, _OWN)
    inner = rewrite(equation.params["jaxpr"], operands, context.inside(equation))
    return inner.values(bind(equation, _arrays(operands), jaxpr=inner.closed))


@handles("closed_call", "core_call")
def run_call(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Calls a program on operands in the dtypes that they have by now."""
    inner = rewrite(equation.params["call_jaxpr"], operands, context.inside(equation))
    return inner.values(bind(equation, _arrays(operands), call_jaxpr=inner.closed))


@handles("remat2", "checkpoint", "remat")
def run_checkpoint(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Calls what is computed again for the backward, in the same dtypes both times."""
    inner = rewrite(_closed(equation.params["jaxpr"]), operands, context.inside(equation))
    # It holds an open program, so what that was traced with becomes arguments.
    arrays = [*inner.closed.consts, *_arrays(operands)]
    return inner.values(bind(equation, arrays, jaxpr=without_consts(inner.closed.jaxpr)))


@handles("shard_map")
def run_shard_map(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Calls what runs on every device for its part of the operands."""
    params, origins = equation.params, [each.origin for each in operands]
    context, results = context.inside(equation), list[Value]()

    def run(*arrays: Any) -> tuple[Any, ...]:
        results[:] = interpret(params["jaxpr"], (), list(map(Value, arrays, origins)), context)
        return tuple(_arrays(results))

    mapped = jax.shard_map(
        run,
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=manual_axes(equation),
        check_vma=params["check_vma"],
    )
    with located(equation):
        out = mapped(*_arrays(operands))
    return [Value(*pair) for pair in zip(out, [each.origin for each in results], strict=True)]


@handles("convert_element_type")
def run_convert(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Changes a dtype where the program asks for another one than it believes to have."""
    (operand,), old, new = operands, equation.invars[0].aval.dtype, equation.params["new_dtype"]
    if new == old and operand.dtype != new:
        return [operand]
    if new == old:
        return [Value(each, operand.origin) for each in bind(equation, [operand.array])]
    if new in ELIGIBLE and old in ELIGIBLE:
        results = [Value(operand.in_(new), operand.origin)]
        return noted(context, equation, operands, results, Decision("as written", _ASKED, new))
    # True and False are 1 and 0 in every format.
    origin = constant(1.0) if old == jnp.bool_ else operand.origin
    out = bind(equation, [operand.array])
    return [Value(each, origin if origin.kind == "constant" else UNKNOWN) for each in out]
