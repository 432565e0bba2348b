"""Run by test_sharded.py, in a process with four devices."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from halfstep.jax import apply_if_finite, apply_updates, clip_by_global_norm, with_masters
from tests.jax.compiling import Compiled
from tests.jax.masters import equal

BAD = ((), (0, 1), (15, 3), (7, 0), ())


def run(sharding, replicated, layout):
    """Trains five steps, of which three are spoiled in one place, and returns each state."""
    inner = optax.chain(clip_by_global_norm(1e9), with_masters(optax.sgd(0.1), layout))
    optimizer = apply_if_finite(inner, loss_scale="dynamic(growth_interval=1, hysteresis=2)")

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state

    params = jax.device_put(jnp.ones((16, 4), jnp.bfloat16), sharding)
    state = jax.tree.map(
        lambda leaf: jax.device_put(leaf, sharding if leaf.shape == params.shape else replicated),
        optimizer.init(params),
    )
    compiled, states = Compiled(step), []
    for number, place in enumerate(BAD):
        grads = jnp.full((16, 4), 2.0**number)
        grads = jax.device_put(grads.at[place].set(jnp.nan) if place else grads, sharding)
        params, state = compiled(params, state, grads)
        states.append((params, state))
    return states, compiled


@pytest.mark.parametrize("layout", ["cast", "split"])
def test_four_devices_decide_as_one_does(layout):
    assert jax.device_count() == 4
    mesh = Mesh(jax.devices(), ("data",))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(mesh, PartitionSpec())
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with jax.numpy_dtype_promotion("standard"):
        (many, compiled), (single, _) = run(rows, replicated, layout), run(one, one, layout)
    for theirs, ours in zip(single, many, strict=True):
        equal(ours, theirs)
    assert [state.last_finite.item() for _, state in many] == [not place for place in BAD]
    assert many[-1][0].sharding.is_equivalent_to(rows, 2)
    assert (compiled.traces, compiled.compilations) == (1, 1)
