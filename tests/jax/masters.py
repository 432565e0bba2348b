"""Trains through masters and in float32, and compares the bits."""

import jax
import jax.numpy as jnp
import numpy

from halfstep.jax import master_params, with_masters
from tests.jax.optimizers import OPTIMIZERS, train

LAYOUTS = [("cast", "bfloat16"), ("split", "bfloat16"), ("cast", "float16")]


def tree(dtype, seed, scale=1.0):
    """Returns parameters or gradients, one of which stays in float32."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "w": (jax.random.normal(keys[0], (8, 16)) * scale).astype(dtype),
        "v": [(jax.random.normal(keys[1], (16,)) * scale).astype(dtype)],
        "b": jax.random.normal(keys[2], (16,)) * scale,
    }


def widened(values):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values)


def equal(a, b):
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert one.dtype == other.dtype
        assert numpy.asarray(one).tobytes() == numpy.asarray(other).tobytes()


def check(name, layout, dtype, apply, *, jit):
    params = tree(dtype, 0, 0.1)
    grads = [tree(dtype, seed) for seed in range(1, 5)]
    inner = OPTIMIZERS[name]()
    ours = train(with_masters(inner, layout), params, grads, jit=jit, apply=apply)
    theirs = train(inner, widened(params), map(widened, grads), jit=jit, apply=apply)
    for (low, state), (full, inner_state) in zip(ours, theirs, strict=True):
        equal(master_params(state, low), full)
        equal(state.inner_state, inner_state)
        nearest = jax.tree.map(lambda one, other: one.astype(other.dtype), full, low)
        if layout == "cast":
            equal(low, nearest)
