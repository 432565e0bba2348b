"""What is computed only if it is needed, where that saves anything."""

from collections.abc import Callable
from typing import TypeVar

import jax

Tree = TypeVar("Tree")


def only_if(pred: jax.Array, compute: Callable[[], Tree], otherwise: Callable[[], Tree]) -> Tree:
    """Returns what is computed where a predicate holds, else another tree like it.

    Compiled for a CPU, nothing is computed if it does not hold. Elsewhere there is no branch, for
    which the device would have to tell the outcome first, but a choice between two results.

    Example:
        >>> import jax.numpy as jnp
        >>> only_if(jnp.bool_(True), lambda: jnp.int32(1), lambda: jnp.int32(0)).item()
        1
    """
    known = not isinstance(pred, jax.core.Tracer)
    # Traced once, not once for each use.
    compute = compute if known else jax.jit(compute)

    def either() -> Tree:
        return jax.tree.map(lambda a, b: jax.lax.select(pred, a, b), compute(), otherwise())

    if known:
        return either()
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(pred, compute, otherwise), default=either
    )
