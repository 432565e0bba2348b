"""Rewrites programs that are held by an equation, such as the body of a loop."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.jax import _private
from halfstep.jax._interpret._context import Context
from halfstep.jax._interpret._interpreter import interpret
from halfstep.jax._interpret._values import ELIGIBLE, Origin, Value, parameters


@dataclass(frozen=True)
class Rewritten:
    """A program whose operations run in the dtypes that the rules say.

    Args:
        closed: The program.
        origins: Where its results come from.
    """

    closed: Any
    origins: tuple[Origin, ...]

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """The dtypes of its results."""
        return tuple(getattr(aval, "dtype", None) for aval in self.closed.out_avals)

    def values(self, arrays: Sequence[Any]) -> list[Value]:
        """Returns results with where they come from."""
        return [Value(*pair) for pair in zip(arrays, self.origins, strict=True)]


# Programs that JAX keeps, as those of its own functions, are rewritten once for each use of them.
_KEPT: weakref.WeakKeyDictionary[Any, dict[Any, Rewritten]] = weakref.WeakKeyDictionary()


def rewrite(
    closed: Any,
    operands: Sequence[Value],
    context: Context,
    outputs: Sequence[Any] | None = None,
) -> Rewritten:
    """Returns a program as it is to run on operands in the dtypes that they have by now.

    Args:
        closed: The program, a closed jaxpr.
        operands: What it is going to be called with.
        context: The rules.
        outputs: The dtypes that its results must have, None for whatever comes out, and for each
            of them None for that.
    """
    avals = tuple(map(_arriving, closed.in_avals, operands))
    origins = tuple(each.origin for each in operands)
    wanted = tuple(outputs or [None] * len(closed.out_avals))
    if context.note is not None:
        return _rewritten(closed, avals, origins, wanted, context)
    kept = _KEPT.setdefault(closed if closed.consts else closed.jaxpr, {})
    key = avals, origins, wanted, context, _private.trace_context()
    if key not in kept:
        kept[key] = _rewritten(closed, avals, origins, wanted, context)
    return kept[key]


def _arriving(aval: Any, value: Value) -> Any:
    """Returns the type of an operand, whose dtype may not be the one it was traced with."""
    if getattr(aval, "dtype", None) not in ELIGIBLE or hasattr(aval, "inner_aval"):
        return aval
    return aval if aval.dtype == value.dtype else aval.update(dtype=value.dtype, weak_type=False)


def _rewritten(
    closed: Any,
    avals: tuple[Any, ...],
    origins: tuple[Origin, ...],
    wanted: tuple[Any, ...],
    context: Context,
) -> Rewritten:
    found: list[Origin] = []

    def run(*arrays: Any) -> list[Any]:
        results = interpret(
            closed.jaxpr, parameters(closed.consts), list(map(Value, arrays, origins)), context
        )
        found[:] = [each.origin for each in results]
        return [_wanted(*pair) for pair in zip(results, wanted, strict=True)]

    jaxpr = _private.trace(run, closed.jaxpr, avals)
    return Rewritten(_with_effects(jaxpr, closed.jaxpr.effects), tuple(found))


def _wanted(value: Value, dtype: Any) -> Any:
    return value.array if dtype is None else value.in_(dtype)


def _with_effects(closed: Any, effects: Any) -> Any:
    # The branches of a `cond` claim the effects of all of them.
    return closed.replace(jaxpr=closed.jaxpr.replace(effects=effects))


def wanted_dtypes(avals: Sequence[Any]) -> list[Any]:
    """Returns the dtypes of results that must not change, None for what has none to change."""
    return [aval.dtype if getattr(aval, "dtype", None) in ELIGIBLE else None for aval in avals]
