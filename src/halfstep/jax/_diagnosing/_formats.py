"""Runs an equation in another format than the one that it was traced in."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from halfstep.jax._interpret import is_low
from halfstep.jax._private import bind, sub_jaxprs

# They read the bits of their operand, or round to a format that is given in bits.
_FIXED = ("bitcast_convert_type", "reduce_precision")


def run_equation(equation: Any, arrays: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns what an equation gives.

    Args:
        equation: The equation, run as a whole if it holds other programs.
        arrays: Its operands, in whatever dtypes.
        dtype: What takes the place of float16 and bfloat16, None for the dtypes as they are.
    """
    holds_others = any(True for _ in sub_jaxprs(equation.params))
    if dtype is None or holds_others or equation.primitive.name in _FIXED:
        return bind(equation, list(map(_declared, equation.invars, arrays)))
    changes = {name: dtype for name, given in equation.params.items() if _is_low_dtype(given)}
    return bind(
        equation, [_in(dtype, var.aval, each) for var, each in _pairs(equation, arrays)], **changes
    )


def _pairs(equation: Any, arrays: Sequence[Any]) -> Any:
    return zip(equation.invars, arrays, strict=True)


def _is_low_dtype(given: Any) -> bool:
    return isinstance(given, np.dtype) and is_low(given)


def _in(dtype: Any, aval: Any, array: Any) -> Any:
    return _cast(array, dtype) if is_low(getattr(aval, "dtype", None)) else array


def _declared(var: Any, array: Any) -> Any:
    dtype = getattr(var.aval, "dtype", None)
    return _cast(array, dtype) if is_low(dtype) else array


def _cast(array: Any, dtype: Any) -> Any:
    if not hasattr(array, "dtype") or hasattr(jax.typeof(array), "inner_aval"):
        return array
    return array if array.dtype == dtype else lax.convert_element_type(array, dtype)
