import jax
import jax.numpy as jnp
import optax
import pytest

from halfstep.jax import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    apply_if_finite,
    apply_updates,
    jmp,
    with_masters,
)
from tests.jax.masters import equal, tree

SCALES = (
    lambda: DynamicLossScale("dynamic(init_scale=8.0, growth_interval=3)"),
    lambda: StaticLossScale(8.0),
    NoOpLossScale,
    lambda: jmp.DynamicLossScale(8.0, period=3, min_loss_scale=0.5),
)


def trained(scale, steps=5):
    """Returns an optimizer and what it has trained with one overflow."""
    optimizer = apply_if_finite(with_masters(optax.adam(1e-3), "split"), loss_scale=scale())
    params = tree("bfloat16", 0)
    return optimizer, *go_on(optimizer, params, optimizer.init(params), range(1, steps))


def go_on(optimizer, params, state, seeds):
    with jax.numpy_dtype_promotion("standard"):
        for seed in seeds:
            grads = state.loss_scale.scale(tree("bfloat16", seed))
            grads["b"] = grads["b"].at[0].set(jnp.inf if seed == 2 else 0.0)
            updates, state = jax.jit(optimizer.update)(grads, state, params)
            params = apply_updates(params, updates)
    return params, state


def with_flax(state, fresh, path):
    serialization = pytest.importorskip("flax.serialization")
    return serialization.from_bytes(fresh(), serialization.to_bytes(state()))


def with_orbax(state, fresh, path):
    orbax = pytest.importorskip("orbax.checkpoint")
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", state())
        checkpointer.wait_until_finished()
        return checkpointer.restore(path / "state", fresh())


@pytest.mark.parametrize("through", [with_flax, with_orbax])
@pytest.mark.parametrize("scale", SCALES)
def test_a_run_that_was_saved_goes_on_with_the_same_bits(through, scale, tmp_path):
    optimizer, params, state = trained(scale)
    expected = go_on(optimizer, params, state, range(5, 8))
    loaded = through(lambda: state, lambda: optimizer.init(params), tmp_path)
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    equal(loaded, state)
    equal(go_on(optimizer, params, loaded, range(5, 8)), expected)
