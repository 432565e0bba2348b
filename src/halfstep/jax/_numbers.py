"""Leaves of trees: which ones are numbers, and in which dtype they are multiplied."""

from typing import Any

import jax
import jax.numpy as jnp


def is_inexact(leaf: Any) -> bool:
    """Returns whether a leaf holds real or complex numbers that are rounded."""
    return bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))


def is_low(leaf: Any) -> bool:
    """Returns whether a leaf holds real numbers in fewer bits than float32."""
    dtype = jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4)


def wide(leaf: Any) -> jax.Array:
    """Returns a leaf in the dtype of its products: at least float32, exactly converted.

    Example:
        >>> wide(jnp.float16(0.5)).dtype, wide(jnp.complex64(1j)).dtype
        (dtype('float32'), dtype('complex64'))
    """
    leaf = jnp.asarray(leaf)
    if is_low(leaf) or not is_inexact(leaf):
        return leaf.astype(jnp.float32)
    return leaf


def is_number(leaf: Any) -> bool:
    """Returns whether a leaf can be multiplied: no random key, and no gradient of an integer."""
    dtype = jnp.result_type(leaf)
    return bool(jnp.issubdtype(dtype, jnp.number))
