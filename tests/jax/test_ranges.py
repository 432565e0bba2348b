"""How the values of a function and its gradient lie, by scope and operation."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from halfstep.core import Exponents, Ranges
from halfstep.jax import autocast, loss_scale
from halfstep.jax._looking import Looking
from halfstep.jax._ranges import ranges

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {
    "in": jax.random.normal(KEYS[0], (16, 8)) / 4,
    "bias": jnp.zeros(8),
    "out": jax.random.normal(KEYS[1], (8, 4)) / 3,
}
INPUTS = jax.random.normal(KEYS[2], (64, 16))
STATE = loss_scale("dynamic(init_scale=65536.0)")


def loss(params, inputs):
    with jax.named_scope("body"):
        hidden = jnp.tanh(inputs @ params["in"] + params["bias"])
    with jax.named_scope("head"):
        return 1e-6 * jnp.mean((hidden @ params["out"]) ** 2)


def found(function, *args, **options):
    seen, power = ranges(function, args, {}, argnums=0, **options)
    return {(row.module, row.role): row for row in seen.rows}, seen, power


def test_what_each_operation_gives_and_its_gradient():
    rows, seen, power = found(loss, PARAMS, INPUTS)
    assert (seen.form, power, seen.entering) == ("float16", 0, 0.0)
    product = INPUTS @ PARAMS["in"]
    assert rows["body.dot_general", "output"].run == Exponents.of(product)
    assert rows["body.tanh", "output"].reference == Exponents.of(jnp.tanh(product))
    gradient = jax.grad(loss)(PARAMS, INPUTS)
    for name, value in gradient.items():
        row = rows[f"args[0]['{name}']", "grad_weight"]
        assert row.reference == row.run == Exponents.of(value)
    assert rows["body.dot_general", "grad_input"].run == Exponents.of(gradient["in"])
    modules = ["body.dot_general", "body.add", "body.tanh", "head.dot_general", "head.integer_pow"]
    assert list(seen.modules)[:5] == modules


BATCHED = jax.vmap(autocast(loss, "mixed_float16"), (None, 0))
NUMBER = jnp.float32(65536.0)
LOW = "mixed_float16, scale=none"
WAYS = {
    "as it is": (lambda p, x, s: autocast(loss, LOW)(p, x), 0),
    "region": (lambda p, x, s: autocast(loss, "mixed_float16")(p, x), 29),
    "scaled loss": (lambda p, x, s: s.scale(autocast(loss, LOW)(p, x)), 16),
    "closed over": (lambda p, x, s: STATE.scale(autocast(loss, LOW)(p, x)), 16),
    "without a name": (lambda p, x, s: NUMBER * autocast(loss, LOW)(p, x), 16),
    "both": (lambda p, x, s: s.scale(autocast(loss, "mixed_float16")(p, x)), 29),
    "state": (lambda p, x, s: autocast(loss, "mixed_float16", scale=s)(p, x), 35),
    "rows": (lambda p, x, s: BATCHED(p, x[None])[0], 29),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_scale_that_multiplied_gradients_is_known(way):
    function, expected = WAYS[way]
    rows, seen, power = found(function, PARAMS, INPUTS, STATE, scale=65536.0)
    plain, *_ = found(loss, PARAMS, INPUTS)
    assert power == expected
    row = rows["head.dot_general", "grad_input"]
    expected = plain["head.dot_general", "grad_input"].run
    assert (row.form, row.reference.counts) == ("float16", expected.counts)
    if power:
        assert row.run.highest - row.reference.highest == power
        assert row.lost < 0.01
    else:
        assert row.lost == 1.0
    assert seen.lost(power) == pytest.approx(0.94 if power == 0 else 0.0, abs=0.01)


def test_a_scale_that_is_told_is_the_one_that_fits():
    cast = autocast(loss, "mixed_float16", scale=2.0**-16)
    rows, seen, _ = found(cast, PARAMS, INPUTS)
    assert rows["head.dot_general", "grad_input"].lost > 0.1
    assert seen.region_scale > 2.0**-8
    again, _, _ = found(autocast(loss, "mixed_float16", scale=seen.region_scale), PARAMS, INPUTS)
    assert again["head.dot_general", "grad_input"].lost == 0.0
    np.testing.assert_allclose(
        jax.grad(autocast(loss, "mixed_float16", scale=seen.region_scale))(PARAMS, INPUTS)["in"],
        jax.grad(loss)(PARAMS, INPUTS)["in"],
        atol=1e-9,
    )


def test_loops_add_up_and_a_step_that_takes_gradients_is_told_apart():
    def looped(w, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, 3)[0].mean()

    def step(w, x):
        return w - 0.1 * jax.grad(looped)(w, x)

    weights, inputs = jnp.eye(4) / 2, jnp.ones((2, 4))
    rows, *_ = found(looped, weights, inputs)
    of_step, *_ = found(step, weights, inputs)
    for each in (rows, of_step):
        (turns,) = [each[at] for at in each if at[0].endswith(".tanh") and at[1] == "output"]
        assert turns.run.total == 3 * 8
    assert of_step["step.dot_general", "grad_input"].run.total == 3 * (16 + 8)
    assert rows["args[0]", "grad_weight"].run == Exponents.of(jax.grad(looped)(weights, inputs))


def test_what_cannot_be_counted_is_told():
    calls = []

    def fussy(w):
        calls.append(w)
        if len(calls) > 1:
            raise ValueError("Once only.")
        return (w * w).sum()

    looking = Looking()
    end = looking.start()
    jax.value_and_grad(fussy)(jnp.ones(2))
    looking.flush()
    assert looking.ranges(1.0).ranges == Ranges()
    end()
    assert "could not be counted: ValueError: Once only." in " ".join(looking.notes)


def test_what_was_called_is_counted():
    looking = Looking()
    end = looking.start()
    jax.jit(lambda w: w - jax.grad(loss)(w, INPUTS)["in"].sum())  # It is never called.
    step = jax.jit(lambda w, x: jax.tree.map(jnp.add, w, jax.grad(loss)(w, x)))
    step(PARAMS, INPUTS)
    looking.flush()
    seen = looking.ranges(1.0)
    end()
    rows, expected, power = found(loss, PARAMS, INPUTS)
    assert (seen.ranges, seen.power) == (expected, power)
    assert ("head.dot_general", "output") in rows


def cell(carry, row):
    with jax.named_scope("cell"):
        carry = jnp.tanh(carry.astype(jnp.float16) * row.astype(jnp.float16)).astype(jnp.float32)
    return carry, carry.sum()


# How many turns a loop has, and how many of them are looked at.
LONG = {64: 64, 65: 2, 100: 3, 250: 4}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("turns", LONG)
def test_of_a_long_loop_some_turns_are_looked_at(turns, reverse):
    def loss(start, rows):
        carry, sums = jax.lax.scan(cell, start, rows, reverse=reverse)
        return carry.sum() + sums.mean()

    start, rows = jnp.full(4, 0.5), jnp.full((turns, 4), 1.5)
    seen, _ = ranges(loss, (start, rows), {}, argnums=(0, 1))
    counted = {(row.module, row.role): row.run.total for row in seen.rows}
    assert counted["cell.mul", "output"] == counted["cell.tanh", "output"] == 4 * LONG[turns]
    # What comes of the loop is that of all turns.
    (weights,) = [row for row in seen.rows if row.module == "args[1]"]
    expected = Exponents.of(np.asarray(jax.grad(loss, 1)(start, rows)))
    assert weights.run.total == expected.total == 4 * turns
    assert weights.run.largest == pytest.approx(expected.largest, rel=1e-3)


def test_of_a_loop_of_unknown_length_the_first_turns_are_looked_at():
    def loop(start):
        state = (jnp.int32(0), start)
        step = lambda state: (state[0] + 1, cell(state[1], jnp.float32(1.5))[0])  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 200, step, state)[1]

    seen, _ = ranges(loop, (jnp.full(4, 0.5),), {}, argnums=())
    (row,) = [row for row in seen.rows if row.module == "cell.tanh"]
    assert row.run.total == 4 * 64
