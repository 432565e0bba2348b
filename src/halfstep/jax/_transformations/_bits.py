"""Rounds float32 to half precision and splits it, within float32 and integers.

A compiler may drop a conversion to half precision and back; these roundings it may not.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Exponent and mantissa bits of the formats that masters are kept for.
FORMATS = {"float16": (5, 10), "bfloat16": (8, 7)}

# Below it float16 is spaced evenly, by 2**-24, and XLA rounds to zero.
_SMALLEST_NORMAL = 2.0**-14


def rounded(values: Any, dtype: Any) -> jax.Array:
    """Returns the nearest numbers of a half-precision format, in float32.

    Example:
        >>> rounded(jnp.float32(1.001), "bfloat16"), rounded(jnp.float32(1e-7), "float16")
        (Array(1., dtype=float32), Array(1.1920929e-07, dtype=float32))
    """
    values, name = jnp.asarray(values), jnp.dtype(dtype).name
    nearest = lax.reduce_precision(values, *FORMATS[name])
    if name == "bfloat16":
        return nearest
    even = lax.round(values * 2.0**24, lax.RoundingMethod.TO_NEAREST_EVEN) * 2.0**-24
    return jnp.where(jnp.abs(values) < _SMALLEST_NORMAL, even, nearest)


def split(master: Any) -> tuple[jax.Array, jax.Array]:
    """Splits float32 into the nearest bfloat16, in float32, and an int16 with what it lacks.

    The bits of the master are those of the first number plus the second, as integers; so ties are
    rounded away from zero. Every finite master and infinity can be merged again.

    Example:
        >>> split(jnp.float32(1.001))
        (Array(1., dtype=float32), Array(8389, dtype=int16))
    """
    bits = _bits(master)
    remainder = bits.astype(jnp.int16)
    low = lax.bitcast_convert_type(bits - remainder.astype(jnp.int32), jnp.float32)
    lost = jnp.isnan(master)
    return jnp.where(lost, jnp.nan, low), jnp.where(lost, jnp.int16(0), remainder)


def merge(low: Any, remainder: Any) -> jax.Array:
    """Merges what `split` made of a master.

    Where somebody else wrote a zero or an infinity to the parameter, a remainder that would make
    a NaN of it is ignored.

    Example:
        >>> merge(jnp.bfloat16(1.0), jnp.int16(8389))
        Array(1.001, dtype=float32)
    """
    low = low.astype(jnp.float32)
    master = lax.bitcast_convert_type(_bits(low) + remainder.astype(jnp.int32), jnp.float32)
    return jnp.where(jnp.isnan(master) | jnp.isnan(low), low, master)


def same_bits(a: Any, b: Any) -> jax.Array:
    """Returns where two float32 arrays agree in every bit, the sign of zero included."""
    return _bits(a) == _bits(b)


def _bits(values: Any) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int32)
