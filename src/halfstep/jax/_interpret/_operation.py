"""Runs one operation in the dtype that the rules say."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp

from halfstep.jax._interpret._casts import run_in
from halfstep.jax._interpret._context import Context, Decision
from halfstep.jax._interpret._folding import folded
from halfstep.jax._interpret._values import (
    BIAS,
    ELIGIBLE,
    FLOAT32,
    PARAMETER,
    PRODUCT,
    Origin,
    Value,
    fits,
    is_low,
    widest,
)
from halfstep.jax._ops import (
    BOUNDING,
    COMPARING,
    FAMILY_OF,
    MOVING,
    RESHAPING,
    SEPARATE,
    plain_name,
)
from halfstep.jax._private import bind

_NO_RULE = "No rule speaks of it, so it runs in what arrives."
_FOLLOWS = "A number that the program holds follows the others."
_MOVES = "It hands on the values that it is given."
_BIAS = "A bias belongs to the product that it is added to."
_UNKNOWN = "halfstep knows nothing of it, so it runs as it is written."
_READ_WIDE = "What comes out is read in float32, so rounding it before would be for nothing."
_CHOSEN = "Its precision was chosen where it was written."
_FOREIGN = "Its numbers are none of float32, bfloat16 and float16."
_COMBINES = "Its numbers are combined by a function of float32."


def run_operation(
    equation: Any, operands: Sequence[Value], context: Context, wide: frozenset[Any] = frozenset()
) -> list[Value]:
    """Runs an equation that holds no other program.

    Args:
        equation: The equation.
        operands: Its operands.
        context: The rules.
        wide: Variables that are read in float32.
    """
    name = plain_name(equation.primitive.name)
    floats = [_is_float(var.aval) for var in equation.invars]
    if not any(floats):
        return _results(equation, operands, bind(equation, [each.array for each in operands]), name)
    fixed = _why_fixed(equation, name)
    if fixed:
        return as_written(equation, operands, context, fixed)
    decision = _decide(equation, name, list(itertools.compress(operands, floats)), context)
    if _could_widen(name, decision) and not wide.isdisjoint(equation.outvars):
        decision = Decision(decision.action, _READ_WIDE, FLOAT32)
    if decision.dtype is not None and _combines(equation, decision.dtype):
        return as_written(equation, operands, context, _COMBINES)
    out = run_in(decision.dtype, equation, operands, floats)
    results = _results(equation, operands, out, name)
    return noted(context, equation, operands, results, decision)


def as_written(
    equation: Any, operands: Sequence[Value], context: Context, reason: str = _UNKNOWN
) -> list[Value]:
    """Runs an equation in the dtypes that it was traced with."""
    results = [Value(each) for each in bind(equation, declared(equation, operands))]
    if not any(_is_float(var.aval) for var in equation.invars):
        return results
    return noted(context, equation, operands, results, Decision("as written", reason))


def declared(equation: Any, operands: Sequence[Value]) -> list[Any]:
    """Returns the operands in the dtypes that the equation was traced with."""
    pairs = zip(equation.invars, operands, strict=True)
    return [
        each.in_(var.aval.dtype) if _is_eligible(var.aval) else each.array for var, each in pairs
    ]


def noted(
    context: Context,
    equation: Any,
    operands: Sequence[Value],
    results: list[Value],
    decision: Decision,
) -> list[Value]:
    """Returns the results, and tells of the operation whoever listens."""
    if context.note is not None:
        context.note(equation, context.at(equation), operands, results, decision)
    return results


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(getattr(aval, "dtype", np.dtype(int)), jnp.inexact)


def _is_eligible(aval: Any) -> bool:
    # References have a dtype as well, which is that of what they refer to.
    return getattr(aval, "dtype", None) in ELIGIBLE and not hasattr(aval, "inner_aval")


def _why_fixed(equation: Any, name: str) -> str:
    """Returns why an operation can only run as it is written, if so."""
    if name not in FAMILY_OF and name not in MOVING:
        return _UNKNOWN
    if any(_is_float(var.aval) and not _is_eligible(var.aval) for var in equation.invars):
        return _FOREIGN
    chosen = equation.params.get("precision"), equation.params.get("out_dtype")
    return "" if all(map(_is_default, chosen)) else _CHOSEN


def _is_default(precision: Any) -> bool:
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(one is None or one is lax.Precision.DEFAULT for one in each)


def _combines(equation: Any, dtype: Any) -> bool:
    """Returns whether an equation holds a function that takes numbers of another dtype only."""
    held = equation.params.get("update_jaxpr")
    return held is not None and dtype != equation.invars[0].aval.dtype


def _decide(equation: Any, name: str, floats: Sequence[Value], context: Context) -> Decision:
    rule = context.rule(equation, name)
    is_free = rule is None or rule.action in ("widest", "keep")
    if is_free and name in ("add", "add_any") and _adds_bias(floats):
        return Decision("lower", _BIAS, _product(floats).dtype)
    if rule is None:
        together = None if name in SEPARATE else _common(floats, name)
        reason = _MOVES if name in MOVING else _NO_RULE
        return Decision("keep", _with_numbers(reason, together, floats), together)
    dtype = _TARGETS[rule.action](floats, name, context)
    reason = rule.reason
    if rule.action == "widest":
        reason = _with_numbers(reason, dtype, floats)
    return Decision(rule.action, reason, dtype)


def _with_numbers(reason: str, dtype: Any, floats: Sequence[Value]) -> str:
    """Returns the reason for a dtype, which is not the widest where numbers do not count."""
    widened = dtype in (None, widest([each.dtype for each in floats]))
    return reason if widened else f"{reason} {_FOLLOWS}"


def _could_widen(name: str, decision: Decision) -> bool:
    return FAMILY_OF.get(name) == "pointwise" and decision.action in ("widest", "keep")


def _adds_bias(floats: Sequence[Value]) -> bool:
    products = [each for each in floats if each.origin == PRODUCT and is_low(each.dtype)]
    return len(products) == 1 and any(_is_bias(each, products[0]) for each in floats)


def _is_bias(value: Value, product: Value) -> bool:
    """Returns whether a parameter is spread over a product, by the addition itself or before."""
    if value.origin == PARAMETER:
        shape = jnp.shape(value.array)
        return _is_vector(shape) and math.prod(shape) < math.prod(jnp.shape(product.array))
    return value.origin == BIAS


def _is_vector(shape: Sequence[int]) -> bool:
    """Returns whether an array has at most one dimension of more than one element."""
    return sum(size > 1 for size in shape) <= 1


def _product(floats: Sequence[Value]) -> Value:
    return next(each for each in floats if each.origin == PRODUCT)


def _common(floats: Sequence[Value], name: str) -> Any:
    """Returns the widest dtype; a constant follows the others where it can."""
    numbers = [each.origin.number for each in floats if each.origin.kind == "constant"]
    others = widest([each.dtype for each in floats if each.origin.kind != "constant"])
    if others is None or not all(_follows(number, others, name) for number in numbers):
        return widest([each.dtype for each in floats] + [others or FLOAT32])
    return others


def _follows(number: float, dtype: Any, name: str) -> bool:
    if name in COMPARING:
        with np.errstate(over="ignore"):
            return bool(np.asarray(number, dtype) == number)
    return name in BOUNDING or fits(number, dtype)


_TARGETS: dict[str, Callable[[Sequence[Value], str, Context], Any]] = {
    "lower": lambda floats, name, context: context.compute_dtype,
    "full": lambda floats, name, context: FLOAT32,
    "widest": lambda floats, name, context: _common(floats, name),
    "keep": lambda floats, name, context: _common(floats, name),
}


def _results(
    equation: Any, operands: Sequence[Value], out: Sequence[Any], name: str
) -> list[Value]:
    origin = _origin(equation, operands, name)
    return [Value(each, origin) for each in out]


def _origin(equation: Any, operands: Sequence[Value], name: str) -> Origin:
    if FAMILY_OF.get(name) in ("matmul", "convolution"):
        return PRODUCT
    if name in RESHAPING:
        return _reshaped(equation, operands[0].origin)
    return folded(equation, operands, name)


def _reshaped(equation: Any, origin: Origin) -> Origin:
    """Returns the origin of an array in another shape; a vector of more dimensions is a bias."""
    before, after = equation.invars[0].aval, equation.outvars[0].aval
    if origin == PARAMETER and _is_vector(before.shape) and after.ndim > before.ndim:
        return BIAS
    return origin
