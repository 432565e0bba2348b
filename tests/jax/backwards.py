"""Functions whose backward is not linear, and where they may stand."""

import jax
from jax import lax
from jax import numpy as jnp

from halfstep.jax import autocast

KEYS = jax.random.split(jax.random.key(0), 3)
X, W = jax.random.normal(KEYS[0], (16, 8)), jax.random.normal(KEYS[1], (8, 8)) / 3
LAYERS = jax.random.normal(KEYS[2], (3, 8, 8)) / 3
F16 = "mixed_float16"


def backward(function):
    """Returns the identity, with a function of the cotangent as its backward."""

    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, cotangent: (function(cotangent),))
    return same


@jax.custom_vjp
def clip_gradient(low, high, x):
    return x


clip_gradient.defvjp(
    lambda low, high, x: (x, (low, high)),
    lambda bounds, cotangent: (None, None, jnp.clip(cotangent, *bounds)),
)


def by_norm(cotangent):
    return cotangent * jnp.minimum(1.0, 3e-3 / jnp.linalg.norm(cotangent))


OWN = {
    "clip": lambda x: clip_gradient(-1e-4, 1e-4, x),
    "norm": backward(by_norm),
    "unit": backward(lambda cotangent: cotangent / (jnp.linalg.norm(cotangent) + 1e-6)),
    "soft": backward(lambda cotangent: cotangent / (jnp.abs(cotangent) + 1e-2)),
}


def plain(own, w, x):
    return jnp.mean(jnp.tanh(own(jnp.tanh(x @ w)) @ w) ** 2)


def several(own, w, x):
    return plain(own, own(w), own(x @ w)) + jnp.mean(own(x))


def low_around(own, w, x):
    return jnp.mean(own(x @ w) @ own(w))


def residual(own, w, x):
    h = x @ w
    return jnp.mean(jnp.tanh(h + own(jnp.tanh(h))) @ w)


def jitted(own, w, x):
    return jnp.mean(jax.jit(lambda h: jnp.tanh(own(h @ w)))(x @ w) @ w)


def checkpointed(own, w, x):
    return jnp.mean(jax.checkpoint(lambda h: jnp.tanh(own(h @ w)) @ w)(x @ w) ** 2)


def saving_products(own, w, x):
    policy = jax.checkpoint_policies.dots_saveable
    return jnp.mean(jax.checkpoint(lambda h: own(jnp.tanh(h @ w)) @ w, policy=policy)(x) ** 2)


def branching(own, w, x):
    h = x @ w
    kept = lax.cond(h[0, 0] > 0, lambda h: own(h @ w), lambda h: h, h)
    return jnp.mean(lax.switch(jnp.int32(1), [jnp.tanh, own, jnp.sin], kept @ w) ** 2)


def layered(own, w, x):
    def layer(h, weights):
        return own(jnp.tanh(h @ weights @ w)), jnp.mean(own(h @ w))

    last, means = lax.scan(layer, x @ w, LAYERS * w[0])
    return jnp.mean(last @ w) + jnp.sum(means)


def stacked(own, w, x):
    layers = LAYERS[:, None] * jnp.array([[3.0], [0.3]])[..., None] * w[0]
    turns = layers.reshape(6, 8, 8)
    return jnp.mean(lax.scan(lambda h, each: (own(jnp.tanh(h @ each)), None), x @ w, turns)[0])


def layered_checkpoints(own, w, x):
    @jax.checkpoint
    def layer(h, weights):
        inner = lax.cond(h[0, 0] > 0, own, jnp.tanh, h @ weights)
        return jax.jit(own)(inner + h), None

    return jnp.mean(lax.scan(layer, x @ w, LAYERS * w[0])[0] @ w)


def empty_loop(own, w, x):
    return jnp.mean(lax.scan(lambda h, each: (own(h @ w), each), x @ w, jnp.ones((0, 2)))[0])


def rows_inside(own, w, x):
    return jnp.mean(jax.vmap(lambda row: own(jnp.tanh(row @ w)) @ w)(x) ** 2)


def inner_gradient(own, w, x):
    return jnp.mean(jax.grad(lambda h: jnp.sum(jnp.tanh(own(h @ w) @ w)))(x @ w) @ w)


def nested(own, w, x, policy):
    inside = autocast(lambda h: own(jnp.tanh(h @ w)) @ w, policy)
    return jnp.mean(jnp.tanh(inside(x @ w) @ w) ** 2)


def nested_layers(own, w, x, policy):
    layer = autocast(lambda h, weights: (own(h @ weights), None), policy)
    return jnp.mean(lax.scan(lambda h, each: layer(h, each), x @ w, LAYERS)[0] @ w)


PROGRAMS = [
    *(plain, several, low_around, residual, jitted, checkpointed, saving_products, branching),
    *(layered, stacked, layered_checkpoints, empty_loop, rows_inside, inner_gradient),
]


def worst(ours, true):
    """Returns the largest difference between trees, relative to the largest number."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(true), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)
