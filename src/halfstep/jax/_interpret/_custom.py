"""Functions with derivatives of their own, which they keep: those are gone through as well."""

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.custom_derivatives import SymbolicZero

from halfstep.jax import _private
from halfstep.jax._interpret._context import Context
from halfstep.jax._interpret._degree import is_homogeneous
from halfstep.jax._interpret._interpreter import handles, interpret
from halfstep.jax._interpret._reverse import run_reverse
from halfstep.jax._interpret._rewrite import Rewritten, rewrite
from halfstep.jax._interpret._true import run_true
from halfstep.jax._interpret._values import ELIGIBLE, FLOAT32, Value, is_low, parameters
from halfstep.jax._private import Zero, eval_jaxpr, located


@handles("custom_jvp_call")
def run_custom_jvp(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Calls a function with its own forward-mode rule."""
    inner, run, free = _function(equation, operands, context)
    rule, origins = equation.params["jvp_jaxpr_fun"], [each.origin for each in free]
    quiet = context.inside(equation).quiet()

    # It outlives the trace, so it must not hold a value.
    def moved(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        jaxpr, consts, zeros = rule.call_wrapped(*[False] * len(primals))
        given = [*map(Value, primals, origins), *map(Value, tangents)]
        out = interpret(jaxpr, parameters(consts), given, quiet)
        results = tuple(map(_like, out[: len(zeros)], inner.dtypes))
        return results, _tangents(results, zeros, out[len(zeros) :])

    function = jax.custom_jvp(run)
    function.defjvp(moved)
    with located(equation):
        return inner.values(function(*(each.array for each in free)))


def _function(
    equation: Any, operands: Sequence[Value], context: Context
) -> tuple[Rewritten, Callable[..., Any], Sequence[Value]]:
    """Returns the function itself, what calls it, and the operands it does not close over."""
    count = equation.params["num_consts"]
    inner = rewrite(equation.params["call_jaxpr"], operands, context.inside(equation))
    consts = [each.array for each in operands[:count]]

    def run(*arrays: Any) -> tuple[Any, ...]:
        return tuple(eval_jaxpr(inner.closed.jaxpr, inner.closed.consts, *consts, *arrays))

    return inner, run, operands[count:]


def _like(value: Value, dtype: Any) -> Any:
    """Returns a result in the dtype that was announced."""
    return value.in_(dtype) if dtype in ELIGIBLE and value.dtype in ELIGIBLE else value.array


def _tangents(
    results: Sequence[Any], zeros: Sequence[bool], found: Sequence[Value]
) -> tuple[Any, ...]:
    """Returns a tangent for each result, in its dtype."""
    moving = iter(found)
    pairs = zip(results, zeros, strict=True)
    return tuple(
        _no_tangent(result) if zero else _like(next(moving), jax.typeof(result).dtype)
        for result, zero in pairs
    )


def _no_tangent(result: Any) -> Any:
    if jnp.issubdtype(result.dtype, jnp.inexact):
        return jnp.zeros_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


@handles("custom_vjp_call")
def run_custom_vjp(equation: Any, operands: Sequence[Value], context: Context) -> list[Value]:
    """Calls a function with its own reverse-mode rule."""
    inner, run, free = _function(equation, operands, context)
    rule = _ReverseRule(equation, free, inner, context.inside(equation).quiet())
    function = jax.custom_jvp(run)
    function.defjvp(rule.moved, symbolic_zeros=True)
    with located(equation):
        return inner.values(function(*(each.array for each in free)))


class _ReverseRule:
    """A reverse-mode rule, for operands in the dtypes that they have by now."""

    def __init__(
        self, equation: Any, operands: Sequence[Value], inner: Rewritten, context: Context
    ) -> None:
        self._params = equation.params
        self._dtypes = [each.dtype for each in operands]
        self._origins = [each.origin for each in operands]
        self._inner = inner
        self._context = context

    def moved(
        self, primals: tuple[Any, ...], tangents: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Returns the results, and how they move."""
        results, kept = self._forward(primals)
        closed, missing = self._traced([aval for _, aval in kept])
        pairs = zip(tangents, missing, strict=True)
        moves = [not (isinstance(each, SymbolicZero) or gap) for each, gap in pairs]
        types = list(map(jax.typeof, results))

        def backward(*arrays: Any) -> list[Any]:
            out = iter(self._cotangents(closed, types, arrays))
            every: list[Any] = [None if gap else next(out) for gap in missing]
            pairs = zip(every, self._dtypes, strict=True)
            return [_like(*each) for each in compress(pairs, moves)]

        arrays, ways = [array for array, _ in kept], list(compress(tangents, moves))
        return results, _moved(types, backward, arrays, ways)

    def _forward(self, primals: Sequence[Any]) -> tuple[tuple[Any, ...], list[tuple[Any, Any]]]:
        """Returns the results, and what the backward needs, in the types it was written for."""
        moving = [jnp.issubdtype(each, jnp.inexact) for each in self._dtypes]
        jaxpr, consts = self._params["fwd_jaxpr_thunk"].call_wrapped(*moving)
        values = list(map(Value, primals, self._origins))
        out = interpret(jaxpr, parameters(consts), values, self._context)
        count = len(out) - len(self._inner.dtypes)
        results = map(_like, out[count:], self._inner.dtypes)
        pairs = zip(out[:count], jaxpr.outvars[:count], strict=True)
        kept = [(each.array, var.aval) for each, var in pairs]
        return tuple(results), self._with_forwarded(kept, primals)

    def _with_forwarded(
        self, kept: list[tuple[Any, Any]], primals: Sequence[Any]
    ) -> list[tuple[Any, Any]]:
        """Returns what is kept, with the operands that JAX keeps by their number only."""
        avals = self._params["call_jaxpr"].in_avals
        first = self._params["num_consts"]
        fresh = iter(kept)
        return [
            next(fresh) if number is None else (primals[number - first], avals[number])
            for number in self._params["out_trees"]()[2]
        ]

    def _traced(self, kept: Sequence[Any]) -> tuple[Any, list[bool]]:
        """Returns the backward as it was written, and which operands have no cotangent."""
        missing: list[bool] = []

        def run(*arrays: Any) -> list[Any]:
            out = self._params["bwd"].call_wrapped(*arrays)
            missing[:] = [isinstance(each, Zero) for each in out]
            return [each for each in out if not isinstance(each, Zero)]

        called = self._params["call_jaxpr"]
        outgoing = [aval.to_ct_aval() for aval in called.out_avals]
        return _private.trace(run, called.jaxpr, [*kept, *outgoing]), missing

    def _cotangents(self, closed: Any, types: Sequence[Any], arrays: Sequence[Any]) -> list[Value]:
        """Returns what the backward gives of what was kept and the cotangents of real results."""
        count = len(closed.in_avals) - len(types)
        kept, moving = list(map(Value, arrays[:count])), iter(arrays[count:])
        every = [Value(next(moving)) if _is_real(each) else _no_cotangent(each) for each in types]
        if self._context.scaled and not is_homogeneous(closed, count):
            return _run_as_written(closed, kept, every)
        return interpret(closed.jaxpr, parameters(closed.consts), [*kept, *every], self._context)


def _is_real(aval: Any) -> bool:
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def _no_cotangent(aval: Any) -> Value:
    return Value(np.zeros(aval.shape, jax.dtypes.float0))


def _moved(
    types: Sequence[Any], backward: Callable[..., Any], kept: Sequence[Any], ways: Sequence[Any]
) -> tuple[Any, ...]:
    """Returns a tangent for each result."""
    if not ways:
        return tuple(SymbolicZero(each.to_tangent_aval()) for each in types)
    found = iter(run_reverse(backward, kept, ways, list(filter(_is_real, types))))
    return tuple(
        next(found) if _is_real(each) else SymbolicZero(each.to_tangent_aval()) for each in types
    )


def _run_as_written(closed: Any, kept: list[Value], cotangents: list[Value]) -> list[Value]:
    """Runs a backward in the dtypes that it was written in, on true cotangents."""
    avals = closed.in_avals[len(kept) :]
    moves = [aval.dtype != jax.dtypes.float0 for aval in avals]

    def run(*arrays: Any) -> list[Any]:
        moving = iter(arrays[len(kept) :])
        pairs = zip(cotangents, moves, strict=True)
        given = [Value(next(moving)) if does else each for each, does in pairs]
        operands = map(_like, given, (aval.dtype for aval in avals))
        out = eval_jaxpr(closed.jaxpr, closed.consts, *arrays[: len(kept)], *operands)
        return list(map(_wide, map(Value, out)))

    held = [
        _like(each, aval.dtype)
        for each, aval in zip(kept, closed.in_avals[: len(kept)], strict=True)
    ]
    moving = [_wide(each) for each, does in zip(cotangents, moves, strict=True) if does]
    return list(map(Value, run_true(run, held, moving)))


def _wide(value: Value) -> Any:
    # True numbers may be too small for a low format.
    return value.in_(FLOAT32) if is_low(value.dtype) else value.array
