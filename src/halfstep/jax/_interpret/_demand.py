"""Which results go on into operations in float32, so that rounding them before is for nothing.

A softmax subtracts the largest number and takes exponentials of what is left: with a difference in
a low format, the exponentials in float32 would be exact ones of the wrong numbers.
"""

from collections.abc import Iterator
from typing import Any

from jax import numpy as jnp

from halfstep.jax._interpret._context import Context
from halfstep.jax._ops import FAMILY_OF, RESHAPING, plain_name
from halfstep.jax._private import Literal

_WIDE, _NEUTRAL, _LOW = "wide", "neutral", "low"


def demanded(jaxpr: Any, context: Context) -> frozenset[Any]:
    """Returns the variables of a program that are read in float32, and nowhere in a low format."""
    wide: set[Any] = set()
    low: set[Any] = set()
    for equation in reversed(jaxpr.eqns):
        use = _use(equation, context, wide, low)
        target = {_WIDE: wide, _LOW: low}.get(use)
        if target is not None:
            target.update(_variables(equation.invars))
    return frozenset(wide - low)


def _variables(atoms: Any) -> Iterator[Any]:
    return (atom for atom in atoms if not isinstance(atom, Literal))


def _use(equation: Any, context: Context, wide: set[Any], low: set[Any]) -> str:
    """Returns in which way an equation reads its operands."""
    name = plain_name(equation.primitive.name)
    if FAMILY_OF.get(name) == "pointwise" or name in RESHAPING:
        (out,) = equation.outvars
        return _WIDE if out in wide and out not in low else _NEUTRAL
    if name not in FAMILY_OF or not jnp.issubdtype(equation.invars[0].aval.dtype, jnp.inexact):
        return _LOW
    rule = context.rule(equation, name)
    return _WIDE if rule is not None and rule.action == "full" else _LOW
