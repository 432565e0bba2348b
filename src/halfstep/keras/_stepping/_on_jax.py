"""Steps on the JAX backend of Keras: on the host where values are concrete, else in `lax.cond`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

_LOW = (jnp.float16, jnp.bfloat16)


def widened(grad: Any) -> Any:
    """Returns a low-precision gradient in float32, others as they are."""
    return grad.astype(jnp.float32) if grad.dtype in _LOW else grad


def eager() -> bool:
    """Returns whether what is assigned now is assigned once."""
    return True


def divided(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Returns the gradients over the scale."""
    return [None if grad is None else widened(jnp.asarray(grad)) / scale for grad in grads]


def values(grad: Any) -> Any:
    """Returns the numbers that a gradient holds."""
    return grad


def host(value: Any) -> Any:
    """Returns the numbers of a tensor on the host."""
    return value.tolist()


def all_finite(grads: Sequence[Any], undivided: Any) -> Any:
    """Returns whether every number is finite.

    A CPU goes through the products of a backward column by column where it divides them, and looks
    at them much faster as they are. Dividing makes an inf only where it makes numbers larger.
    """
    if undivided is None:
        return _all_finite(grads)
    given, scale = undivided
    fit = jax.lax.cond(
        scale >= 1, lambda: jnp.bool_(True), lambda: _largest(given) / scale < jnp.inf
    )
    return _all_finite(given) & fit


def _all_finite(grads: Sequence[Any]) -> Any:
    return jnp.all(jnp.array([jnp.isfinite(grad).all() for grad in grads]))


def _largest(grads: Sequence[Any]) -> Any:
    sizes = [jnp.max(jnp.abs(widened(grad)), initial=0) for grad in grads]
    return jnp.max(jnp.array(sizes), initial=0)


def known(finite: Any) -> bool | None:
    """Returns the outcome, unless it is being traced."""
    return None if isinstance(finite, jax.core.Tracer) else bool(finite)


def branch(
    finite: Any, grads: list[Any], update: Callable[[list[Any]], None], cell: Any, written: Any
) -> None:
    """Takes or skips a step whose outcome is being traced."""

    def take() -> None:
        update(grads)
        cell.grow()

    branches = (lambda: _values_after(take, written), lambda: _values_after(cell.back_off, written))
    values = jax.lax.cond(finite, *branches)
    for variable, value in zip(written, values, strict=True):
        variable.assign(value)


def _values_after(step: Callable[[], None], written: Any) -> list[Any]:
    # Assignments inside of lax.cond would leak tracers into the variables.
    with keras.StatelessScope([(variable, variable.value) for variable in written]) as scope:
        step()
    return [scope.get_current_value(variable) for variable in written]


def wide_product(scale: Any, factor: float) -> Any:
    """Returns the product rounded once to float32."""
    with jax.enable_x64(True):
        product = jax.lax.convert_element_type(scale, jnp.float64) * factor
        return jax.lax.convert_element_type(product, jnp.float32)
