"""`LossScale.next` in arrays: the same numbers as on the host, inside of any transformation."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from halfstep.core import LossScale


class Arrays(NamedTuple):
    """A `halfstep.ScaleState` in arrays, a float32 and two int32."""

    scale: Any
    finite_steps: Any
    overflows: Any


def next_state(rule: LossScale, state: Arrays, finite: Any) -> Arrays:
    """Returns the state after a step whose gradients were, or were not, finite.

    Args:
        rule: How the scale changes.
        state: What it is now.
        finite: A boolean array.

    Example:
        >>> state = Arrays(jnp.float32(8.0), jnp.int32(0), jnp.int32(0))
        >>> float(next_state(LossScale(), state, jnp.bool_(False)).scale)
        4.0
    """
    select = functools.partial(jnp.where, finite)
    return Arrays(*map(select, _after_finite(rule, state), _after_overflow(rule, state)))


def _after_finite(rule: LossScale, state: Arrays) -> Arrays:
    due = state.finite_steps + 1 >= rule.growth_interval
    grown = _product(state.scale, rule.growth_factor)
    scale = jnp.where(due & (grown <= rule.max_scale), grown, state.scale)
    return Arrays(
        scale,
        jnp.where(due, 0, state.finite_steps + 1),
        jnp.where(due, 0, state.overflows),
    )


def _after_overflow(rule: LossScale, state: Arrays) -> Arrays:
    overflows = jnp.minimum(state.overflows + 1, rule.hysteresis)
    # A scale that was set below the floor stays where it is.
    floor = jnp.minimum(state.scale, rule.min_scale)
    lower = jnp.maximum(_product(state.scale, rule.backoff_factor), floor)
    scale = jnp.where(overflows == rule.hysteresis, lower, state.scale)
    return Arrays(scale, jnp.zeros_like(state.finite_steps), overflows)


def _product(scale: Any, factor: float) -> Any:
    """Returns the float32 that is nearest to the exact product, as core does."""
    if math.frexp(factor)[0] == 0.5:
        return scale * factor
    with jax.enable_x64(True):
        product = jax.lax.convert_element_type(scale, jnp.float64) * factor
        return jax.lax.convert_element_type(product, jnp.float32)
