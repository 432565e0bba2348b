"""What is computed only in rare cases."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result", bound=jax.Array)


def only_if(pred: jax.Array, compute: Callable[[], Result], otherwise: Result) -> Result:
    """Returns what is computed where a predicate holds, else another array like it.

    On a CPU nothing is computed if it does not hold. Elsewhere there is no branch, for which the
    device would have to tell the outcome first.

    Example:
        >>> only_if(jnp.bool_(True), lambda: jnp.int32(1), jnp.int32(0)).item()
        1
    """
    return jax.lax.platform_dependent(
        cpu=lambda: jax.lax.cond(pred, compute, lambda: otherwise),
        default=lambda: jnp.where(pred, compute(), otherwise),
    )
