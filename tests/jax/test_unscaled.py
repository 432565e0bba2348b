"""Gradients that a function takes itself, inside of a region in float16, are told of."""

import jax
import jax.numpy as jnp
import pytest

from halfstep.jax import UnscaledGradientsWarning, autocast

WEIGHTS = jnp.eye(4)


def loss(weights):
    return 1e-8 * jnp.mean((weights @ weights) ** 2)


def step(weights):
    return weights - jax.grad(loss)(weights)


@pytest.mark.parametrize(
    "around",
    [
        lambda weights: autocast(step, "mixed_float16")(weights),
        lambda weights: jax.jit(autocast(step, "mixed_float16"))(weights),
        lambda weights: autocast(jax.jit(step), "mixed_float16")(weights),
        lambda weights: autocast(jax.jit(jax.value_and_grad(loss)), "mixed_float16")(weights),
    ],
)
def test_a_step_in_a_region_is_told_of(around):
    with pytest.warns(UnscaledGradientsWarning, match=r"jax\.grad\(autocast\(loss") as caught:
        around(WEIGHTS)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "around",
    [
        lambda weights: jax.grad(autocast(loss, "mixed_float16"))(weights),
        lambda weights: jax.jit(jax.vmap(jax.grad(autocast(loss, "mixed_float16"))))(weights[None]),
        lambda weights: autocast(jax.grad(autocast(loss, "mixed_float16")), "mixed_float16")(
            weights
        ),
        lambda weights: autocast(step, "mixed_bfloat16")(weights),
        lambda weights: autocast(step, "mixed_float16, scale=none")(weights),
        lambda weights: jax.grad(autocast(jax.checkpoint(loss), "mixed_float16"))(weights),
    ],
)
def test_a_region_around_the_loss_is_not(around):
    assert jnp.isfinite(around(WEIGHTS)).all()


def test_the_advice_gives_the_gradient():
    advised = jax.grad(autocast(loss, "mixed_float16"))(WEIGHTS)
    assert jnp.allclose(advised, jax.grad(loss)(WEIGHTS), rtol=1e-2, atol=0)
