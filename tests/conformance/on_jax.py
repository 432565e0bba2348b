"""How JAX' side moves a loss scale: the scale alone, and in a compiled step of optax."""

import math
from collections.abc import Iterator

import jax
import optax
from jax import numpy as jnp

from halfstep import LossScale
from halfstep.jax import apply_if_finite, loss_scale
from tests.conformance.front_ends import After

GRADIENTS = {"+": 1.0, "x": math.nan}


def scale(rule: LossScale, steps: str) -> Iterator[After]:
    """A loop that adjusts a scale on the host, and counts by itself."""
    scale, skipped = loss_scale(rule), 0
    for letter in steps:
        finite = jnp.isfinite(GRADIENTS[letter])
        scale, skipped = scale.adjust(finite), skipped + (letter == "x")
        yield After(*scale.state, skipped)


def optimizer(rule: LossScale, steps: str) -> Iterator[After]:
    """A compiled step of optax, which skips."""
    trains = apply_if_finite(optax.sgd(0.0), loss_scale=rule)
    update = jax.jit(trains.update)
    weight = jnp.ones(())
    state = trains.init(weight)
    for letter in steps:
        _, state = update(jnp.float32(GRADIENTS[letter]), state, weight)
        yield After(*state.loss_scale.state, state.total_notfinite.item())
