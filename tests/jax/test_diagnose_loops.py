"""Loops of training steps: the operation of the script is named, and the turn it is in."""

import jax
import optax
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.jax import apply_updates, autocast, clip_by_global_norm, diagnose, with_masters
from tests.jax.diagnosing import single

ROWS = jnp.ones((6, 3)).at[3].set(0.0)


def loss(weights, row):
    with jax.named_scope("model"):
        return jnp.log(jnp.abs(row * weights).sum()).astype(jnp.float32)


def trained(optimizer, form, taken):
    """Returns a loop of training steps over rows."""

    def turn(carry, row):
        weights, state = carry
        value, grads = jax.value_and_grad(taken)(weights, row.astype(form))
        updates, state = optimizer.update(grads, state, weights)
        return (apply_updates(weights, updates), state), value

    def loop(weights, rows):
        weights = weights.astype(form)
        return lax.scan(turn, (weights, optimizer.init(weights)), rows)

    return loop


LOOPS = {
    "masters": trained(with_masters(optax.sgd(0.1)), jnp.bfloat16, loss),
    "split": trained(with_masters(optax.sgd(0.1), layout="split"), jnp.bfloat16, loss),
    "region": trained(optax.sgd(0.1), jnp.float32, autocast(loss, "mixed_float16")),
    "clipped": trained(optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1)), jnp.float32, loss),
}


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_named_is_in_the_script(name):
    first, *others = diagnose(jax.jit(LOOPS[name]), jnp.ones(3), ROWS).faults
    assert (first.module, first.operation) == ("model", "log")
    assert first.note == "in turn 4 of 6 of its loop"
    assert not any("bitcast" in each.operation for each in others)


def test_what_is_read_as_bits_keeps_what_made_it():
    def through_bits(x):
        bits = lax.bitcast_convert_type(jnp.log(x), jnp.int32) & jnp.int32(0x7F800000)
        return lax.bitcast_convert_type(bits, jnp.float32).sum()

    faults = diagnose(through_bits, single(0, 1), argnums=()).faults
    assert [each.operation for each in faults] == ["log"]


def test_turns_of_loops_in_loops():
    def inner(carry, number):
        return carry, jnp.log(number)

    def outer(carry, row):
        return carry, lax.scan(inner, carry, row)[1].sum()

    rows = jnp.ones((3, 4)).at[1, 2].set(0.0)
    fault = diagnose(lambda x: lax.scan(outer, 0.0, x)[1].sum(), rows, argnums=()).first
    assert fault.note == "in turn 2 of 3, turn 3 of 4 of its loop"
