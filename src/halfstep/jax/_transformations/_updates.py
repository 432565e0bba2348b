"""Adding updates to parameters."""

from typing import Any, TypeVar

import jax

from halfstep.jax._numbers import wide

Tree = TypeVar("Tree")


def apply_updates(params: Tree, updates: Any) -> Tree:
    """Returns the parameters plus their updates, in the dtypes of the parameters.

    As `optax.apply_updates`, also where JAX promotes no dtypes by itself: parameters in half
    precision are added to in float32 and rounded once. A leaf whose update is None stays as it is.

    Args:
        params: The parameters.
        updates: What a transformation made of their gradients.

    Example:
        >>> import jax.numpy as jnp
        >>> apply_updates({"w": jnp.ones(2, jnp.bfloat16)}, {"w": jnp.full(2, 0.5)})
        {'w': Array([1.5, 1.5], dtype=bfloat16)}
    """

    def add(param: Any, update: Any) -> Any:
        if param is None or update is None:
            return param
        dtype = jax.numpy.result_type(param)
        with jax.numpy_dtype_promotion("standard"):
            return (wide(param) + update).astype(dtype)

    return jax.tree.map(add, params, updates, is_leaf=lambda leaf: leaf is None)
