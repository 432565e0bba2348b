"""Runs an operation in a dtype.

The derivative of a copy into many places is a sum over them. It runs in the dtype of the copy, so
whatever is spread over more elements is spread in float32, and cast after that.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from halfstep.jax._interpret._values import ELIGIBLE, FLOAT32, Value, is_low, widest
from halfstep.jax._ops import BOUNDING, FAMILY_OF, SPREADING, plain_name
from halfstep.jax._private import bind, located


def run_in(
    dtype: Any, equation: Any, operands: Sequence[Value], floats: Sequence[bool]
) -> list[Any]:
    """Returns what an equation gives.

    Args:
        dtype: What its real operands are cast to, None for what they arrive in.
        equation: The equation.
        operands: Its operands.
        floats: Which of them are real.
    """
    name = plain_name(equation.primitive.name)
    if name in SPREADING and _spreads(equation, operands[0]):
        return _spread(equation, operands, floats, operands[0].dtype if dtype is None else dtype)
    shape = equation.outvars[0].aval.shape if FAMILY_OF.get(name) == "pointwise" else None
    with located(equation):
        arrays = [
            _cast(each, dtype, shape, name) if is_float and dtype is not None else each.array
            for each, is_float in zip(operands, floats, strict=True)
        ]
    return bind(equation, arrays, **_preferred(equation, dtype))


def _cast(value: Value, dtype: Any, shape: tuple[int, ...] | None, name: str) -> Any:
    """Returns an operand in a dtype; the primitive itself spreads one that is smaller."""
    if name in BOUNDING and value.origin.kind == "constant":
        return value.within(dtype)
    before = jnp.shape(value.array)
    if shape in (None, before) or value.origin.kind == "constant" or not is_low(dtype):
        return value.in_(dtype)
    places = range(len(before))
    return Value(lax.broadcast_in_dim(value.in_(FLOAT32), shape, places)).in_(dtype)


def _spreads(equation: Any, operand: Value) -> bool:
    grows = equation.outvars[0].aval.size > equation.invars[0].aval.size
    varies = operand.origin.kind != "constant" and is_low(operand.dtype)
    return varies and (grows or equation.primitive.name == "gather")


def _spread(
    equation: Any, operands: Sequence[Value], floats: Sequence[bool], dtype: Any
) -> list[Any]:
    pairs = zip(operands, floats, strict=True)
    arrays = [each.in_(FLOAT32) if is_float else each.array for each, is_float in pairs]
    return [Value(each).in_(dtype) for each in bind(equation, arrays)]


def _preferred(equation: Any, dtype: Any) -> dict[str, Any]:
    """Returns what a product is to hand on, unless something else was asked for."""
    asked = equation.params.get("preferred_element_type")
    dtypes = [getattr(var.aval, "dtype", None) for var in equation.invars]
    usual = widest([each for each in dtypes if each in ELIGIBLE])
    if asked is None or asked != usual or dtype is None:
        return {}
    return {"preferred_element_type": dtype}
