"""Norms of trees that overflow only where a number already is infinite."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax._numbers import is_inexact, is_number, wide
from halfstep.jax._rarely import only_if
from halfstep.jax._scale import divided
from halfstep.jax._transformations._installed import optax_for

# The power of two that brings any number to where its square does not overflow.
_SHRINKS = {"float32": 2.0**-80, "float64": 2.0**-600}


def global_norm(tree: Any) -> jax.Array:
    """Returns the norm of all numbers of a tree, in float32.

    It is finite if and only if every number is, in every format: squares are summed in float32, of
    smaller numbers if they overflow, and a norm beyond float32 is its largest value.

    Args:
        tree: Arrays and numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> global_norm({"w": jnp.array([3e4, 4e4], jnp.float16)}).item()
        50000.0
    """
    leaves = [wide(part) for leaf in jax.tree.leaves(tree) for part in _real_parts(leaf)]
    if not leaves:
        return jnp.float32(0.0)
    dtype = max((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.itemsize)
    usual = _squares(leaves, dtype, 1.0)
    overflowed = jnp.isinf(usual)
    shrink = _SHRINKS[dtype.name]
    shrunk = only_if(
        overflowed, lambda: _squares(leaves, dtype, shrink), lambda: jnp.ones_like(usual)
    )
    return jnp.where(overflowed, _grown(shrunk, shrink), jnp.sqrt(usual))


def _squares(leaves: list[jax.Array], dtype: Any, factor: float) -> jax.Array:
    return jnp.stack([jnp.square(leaf.astype(dtype) * factor).sum() for leaf in leaves]).sum()


def _grown(shrunk: jax.Array, shrink: float) -> jax.Array:
    norm, most = jnp.sqrt(shrunk) / shrink, jnp.finfo(shrunk.dtype).max
    return jnp.where(jnp.isfinite(shrunk), jnp.minimum(norm, most), norm)


def _real_parts(leaf: Any) -> Iterable[Any]:
    if not is_number(leaf):
        return ()
    return (jnp.real(leaf), jnp.imag(leaf)) if jnp.iscomplexobj(leaf) else (leaf,)


def clip_by_global_norm(max_norm: Any) -> Any:
    """Returns the transformation that scales updates down to a norm, if theirs is larger.

    As `optax.clip_by_global_norm`, with a norm that does not overflow in half precision. Updates
    that are not finite are left as they are, so that whoever looks next sees which ones are bad.

    Args:
        max_norm: The largest norm, a positive number or an array.

    Raises:
        MissingExtraError: If optax is not installed.
        UsageError: If the norm is neither an array nor a positive number.

    Example:
        >>> import jax.numpy as jnp
        >>> clip = clip_by_global_norm(1.0)
        >>> grads = jnp.array([3e4, 4e4], jnp.float16)
        >>> clip.update(grads, clip.init(grads))[0]
        Array([0.6, 0.8], dtype=float16)
    """
    optax = optax_for("clip_by_global_norm")
    is_array = hasattr(max_norm, "dtype")
    if not is_array and (not isinstance(max_norm, (int, float)) or not max_norm > 0):
        raise UsageError(
            f"clip_by_global_norm needs max_norm > 0, got {max_norm!r}. Write for example 1.0."
        )

    def clipped(updates: Any, params: Any = None) -> Any:
        norm = global_norm(updates)
        keep = (norm <= max_norm) | ~jnp.isfinite(norm)

        def clip(leaf: Any) -> Any:
            if not is_inexact(leaf):
                return leaf
            shorter = divided(leaf, norm) * jnp.asarray(max_norm).astype(wide(leaf).dtype)
            return jnp.where(keep, leaf, shorter.astype(leaf.dtype))

        return jax.tree.map(clip, updates)

    return optax.stateless(clipped)
