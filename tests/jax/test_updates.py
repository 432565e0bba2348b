import jax
import jax.numpy as jnp
import optax
import pytest

from halfstep.jax import apply_updates


@pytest.mark.parametrize("param", ["float16", "bfloat16", "float32", "int32"])
@pytest.mark.parametrize("update", ["float16", "bfloat16", "float32"])
def test_updates_are_added_as_optax_adds_them(param, update):
    params = {"w": jnp.array([1, 100, -7]).astype(param), "none": None}
    updates = {"w": jnp.array([0.001, 0.3, 7.0]).astype(update), "none": None}
    with jax.numpy_dtype_promotion("standard"):
        expected = optax.apply_updates(params, updates)
    got = apply_updates(params, updates)
    assert got["w"].dtype == expected["w"].dtype
    assert got["w"].tolist() == pytest.approx(expected["w"].tolist(), rel=2.0**-10)
    assert got["none"] is None


def test_the_sum_is_rounded_once():
    param, update = jnp.bfloat16(1.0), jnp.float32(2.0**-8 + 2.0**-20)
    assert apply_updates(param, update) == 1.0 + 2.0**-7
    assert jax.jit(apply_updates)(param, update) == 1.0 + 2.0**-7


def test_a_negative_zero_changes_nothing():
    zeros = jnp.array([0.0, -0.0], jnp.float16)
    assert jnp.signbit(apply_updates(zeros, jnp.array([-0.0, -0.0]))).tolist() == [False, True]


def test_leaves_without_an_update_stay_as_they_are():
    model = {"w": jnp.ones(2), "activation": jnp.tanh}
    got = apply_updates(model, {"w": jnp.ones(2), "activation": None})
    assert got["w"].tolist() == [2.0, 2.0]
    assert got["activation"] is jnp.tanh
