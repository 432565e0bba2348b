"""Runs an equation in another format than the one that it was traced in."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from halfstep.jax._interpret import is_low
from halfstep.jax._ops import plain_name
from halfstep.jax._private import bind, sub_jaxprs

# They hold a function of their dtype, which is made for it again.
_SCATTERS = ("scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max")
# They read the bits of their operand, or round to a format that is given in bits.
_FIXED = ("bitcast_convert_type", "reduce_precision")


def run_equation(equation: Any, arrays: Sequence[Any], dtype: Any) -> list[Any]:
    """Returns what an equation gives.

    Args:
        equation: The equation, run as a whole if it holds other programs.
        arrays: Its operands, in whatever dtypes.
        dtype: What takes the place of float16 and bfloat16, None for the dtypes as they are.
    """
    if dtype is not None and plain_name(equation.primitive.name) in _SCATTERS:
        return [
            _scattered(equation, [*map(functools.partial(_in, dtype), equation.invars, arrays)])
        ]
    holds_others = any(True for _ in sub_jaxprs(equation.params))
    if dtype is None or holds_others or equation.primitive.name in _FIXED:
        return bind(equation, list(map(_declared, equation.invars, arrays)))
    changes = {name: dtype for name, given in equation.params.items() if _is_low_dtype(given)}
    return bind(
        equation, list(map(functools.partial(_in, dtype), equation.invars, arrays)), **changes
    )


def run_part(equation: Any, arrays: Sequence[Any], **changes: Any) -> list[Any]:
    """Returns what an equation gives in its own formats, with some of its parameters changed."""
    return bind(equation, list(map(_declared, equation.invars, arrays)), **changes)


def _scattered(equation: Any, arrays: Sequence[Any]) -> Any:
    params = {key: given for key, given in equation.params.items() if key[:7] != "update_"}
    return getattr(lax, plain_name(equation.primitive.name))(*arrays, **params)


def _is_low_dtype(given: Any) -> bool:
    return isinstance(given, np.dtype) and is_low(given)


def _in(dtype: Any, var: Any, array: Any) -> Any:
    return _cast(array, dtype) if is_low(getattr(var.aval, "dtype", None)) else array


def _declared(var: Any, array: Any) -> Any:
    dtype = getattr(var.aval, "dtype", None)
    return _cast(array, dtype) if is_low(dtype) else array


def _cast(array: Any, dtype: Any) -> Any:
    if not hasattr(array, "dtype") or hasattr(jax.typeof(array), "inner_aval"):
        return array
    return array if array.dtype == dtype else lax.convert_element_type(array, dtype)
