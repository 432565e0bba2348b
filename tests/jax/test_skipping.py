import re

import jax
import jax.numpy as jnp
import numpy
import optax
import pytest

from halfstep import LossScale
from halfstep.errors import ScaleError, UsageError
from halfstep.jax import (
    DynamicLossScale,
    NoOpLossScale,
    apply_if_finite,
    apply_updates,
    clip_by_global_norm,
    jmp,
    with_masters,
)
from tests.conformance.traces import TRACES
from tests.jax.compiling import Compiled
from tests.jax.masters import equal, tree
from tests.jax.optimizers import OPTIMIZERS

# A case of a boolean, not of the platform, which is decided before anything is compiled.
BRANCH = re.compile(r"\(tensor<i1>\) -> tensor<i32>\n *%\S+ = \"stablehlo\.case\"|stablehlo\.if")
RULE = "dynamic(init_scale=1024.0, growth_interval=2)"


@pytest.fixture(autouse=True)
def standard_promotion():
    """Most of optax promotes dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def stepper(optimizer):
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return apply_updates(params, updates), state

    return Compiled(step)


def spoiled(grads, bad):
    return grads | {"w": grads["w"].at[0].set(bad)}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_no_bit_of_parameters_and_inner_state(name, dtype):
    optimizer = apply_if_finite(OPTIMIZERS[name](), loss_scale=RULE)
    params, grads = tree(dtype, 0), tree(dtype, 1)
    params["b"] = params["b"].at[0].set(-0.0)
    step = stepper(optimizer)
    params, state = step(params, optimizer.init(params), grads)
    for bad in (jnp.inf, -jnp.inf, jnp.nan):
        after, skipped = step(params, state, spoiled(grads, bad))
        equal(after, params)
        equal(skipped.inner_state, state.inner_state)
        assert skipped.loss_scale.state.scale == 512.0
    assert step.compilations == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_finite_steps_are_those_of_the_inner_transformation(name):
    params = tree("float32", 0)
    ours, theirs = stepper(apply_if_finite(OPTIMIZERS[name]())), stepper(OPTIMIZERS[name]())
    state, inner = apply_if_finite(OPTIMIZERS[name]()).init(params), OPTIMIZERS[name]().init(params)
    mine = params
    for seed in range(1, 4):
        mine, state = ours(mine, state, tree("float32", seed))
        params, inner = theirs(params, inner, tree("float32", seed))
    for one, other in zip(*map(jax.tree.leaves, (mine, params)), strict=True):
        numpy.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_the_scale_follows_core(trace):
    optimizer = apply_if_finite(optax.sgd(0.0), loss_scale=DynamicLossScale(trace.rule))
    state = optimizer.init(jnp.float32(1.0))
    update = Compiled(optimizer.update)
    for finite, expected in trace:
        _, state = update(jnp.float32(1.0 if finite else jnp.inf), state)
        assert state.loss_scale.state == expected
    assert (update.traces, update.compilations) == (1, 1)


def test_steps_are_counted_as_optax_counts_them():
    ours, theirs = apply_if_finite(optax.sgd(0.1)), optax.apply_if_finite(optax.sgd(0.1), 99)
    mine, state = ours.init(jnp.float32(0.0)), theirs.init(jnp.float32(0.0))
    fields = ("notfinite_count", "last_finite", "total_notfinite")
    for number, grad in enumerate([1.0, jnp.nan, jnp.inf, 1.0, jnp.nan], 1):
        _, mine = ours.update(jnp.float32(grad), mine)
        _, state = theirs.update(jnp.float32(grad), state)
        assert [getattr(mine, f).item() for f in fields] == [getattr(state, f) for f in fields]
        assert mine.step == number
    assert theirs.init(0.0)._fields == mine._fields[:4]


def test_it_never_gives_in():
    optimizer = apply_if_finite(optax.sgd(0.1), 2)
    state = optimizer.init(jnp.float32(0.0))
    for _ in range(5):
        updates, state = optimizer.update(jnp.float32(jnp.nan), state)
        assert updates == 0.0


def test_gradients_of_a_scaled_loss_train_as_those_of_the_loss():
    def loss(weight):
        return jnp.square(weight - 3.0)

    optimizer = apply_if_finite(optax.adam(0.1), loss_scale=RULE)
    plain, weight, other = optax.adam(0.1), jnp.float32(1.0), jnp.float32(1.0)
    state, inner = optimizer.init(weight), plain.init(other)
    for _ in range(10):
        grad = jax.grad(lambda w, state=state: state.loss_scale.scale(loss(w)))(weight)
        updates, state = optimizer.update(grad, state, weight)
        weight = apply_updates(weight, updates)
        updates, inner = plain.update(jax.grad(loss)(other), inner, other)
        other = apply_updates(other, updates)
    assert weight == other
    assert state.loss_scale.state.scale == 1024.0 * 2**5


def test_small_gradients_of_float16_reach_masters_as_they_are():
    optimizer = apply_if_finite(with_masters(optax.sgd(1.0)), loss_scale="static(65536.0)")
    weight = jnp.float16(0.0)
    state = optimizer.init(weight)
    grad = jax.grad(lambda weight: state.loss_scale.scale(weight * jnp.float16(1.0)) * 1e-9)(weight)
    _, state = optimizer.update(grad, state, weight)
    assert state.inner_state.masters.item() == pytest.approx(-1e-9, rel=1e-3)


def test_unscaled_overflow_counts_as_well():
    optimizer = apply_if_finite(optax.sgd(1.0), loss_scale="dynamic(init_scale=2e-5)")
    _, state = optimizer.update(jnp.float32(3e38), optimizer.init(jnp.float32(0.0)))
    assert not state.last_finite


@pytest.mark.parametrize(
    "scale", [None, "none", "static(8.0)", LossScale(), jmp.DynamicLossScale(8.0)]
)
def test_any_loss_scale_will_do(scale):
    optimizer = apply_if_finite(optax.sgd(1.0), loss_scale=scale)
    state = optimizer.init(jnp.float32(0.0))
    grad = state.loss_scale.scale(jnp.float32(2.0))
    updates, state = jax.jit(optimizer.update)(grad, state)
    assert updates == -2.0
    assert isinstance(apply_if_finite(optax.sgd(1.0)).init(1.0).loss_scale, NoOpLossScale)


def test_micro_batches_are_unscaled_and_skipped_one_by_one():
    steps = optax.MultiSteps(optax.sgd(1.0), 2)
    optimizer = apply_if_finite(steps, loss_scale="dynamic(init_scale=4.0, growth_interval=1)")
    weight = jnp.float32(0.0)
    state, step = optimizer.init(weight), stepper(optimizer)
    for grad in (1.0, jnp.inf, 3.0, 5.0, 7.0):
        scaled = state.loss_scale.scale(jnp.float32(grad))
        weight, state = step(weight, state, scaled)
    assert weight == -(1.0 + 3.0) / 2 - (5.0 + 7.0) / 2
    assert step.compilations == 1


def test_it_composes_with_chain_masked_and_hyperparameters():
    inner = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    optimizer = optax.chain(
        optax.masked(apply_if_finite(inner, loss_scale=RULE), {"w": True, "v": [True], "b": False}),
        optax.scale(1.0),
    )
    params, grads = tree("float32", 0), tree("float32", 1)
    state, step = optimizer.init(params), stepper(optimizer)
    after, state = step(params, state, spoiled(grads, jnp.nan))
    equal(after["w"], params["w"])
    assert not jnp.array_equal(after["b"], params["b"])
    assert optax.tree.get(state, "total_notfinite") == 1
    assert optax.tree.get(state, "loss_scale").state.scale == 512.0
    after, state = step(after, state, grads)
    assert not jnp.array_equal(after["w"], params["w"])
    assert step.compilations == 1


@pytest.mark.parametrize("layout", ["cast", "split"])
def test_a_step_may_be_given_the_memory_of_the_state_and_another_run_started(layout):
    scale = DynamicLossScale()
    optimizer = apply_if_finite(with_masters(optax.adam(1e-3), layout), loss_scale=scale)
    step = jax.jit(optimizer.update, donate_argnums=1)
    params, grads = tree("bfloat16", 0), tree("bfloat16", 1)
    for _ in range(2):
        state = optimizer.init(params)
        for _ in range(2):
            _, state = step(grads, state, params)
        assert state.step == 2
    assert scale.adjust(True).state.scale == 65536.0


@pytest.mark.parametrize(("platform", "branches"), [("cpu", True), ("cuda", False), ("tpu", False)])
def test_only_a_cpu_branches(platform, branches):
    """On a device a branch waits for its outcome."""
    inner = optax.chain(clip_by_global_norm(1.0), with_masters(optax.adam(1e-3), "split"))
    optimizer = apply_if_finite(inner, loss_scale=RULE)
    params = tree("bfloat16", 0)
    traced = jax.jit(optimizer.update).trace(params, optimizer.init(params), params)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert bool(BRANCH.search(text)) == branches


def test_random_keys_and_integers_in_the_inner_state_are_kept():
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), optax.sgd(0.1))
    optimizer = apply_if_finite(noisy)
    state = optimizer.init(jnp.float32(1.0))
    _, skipped = jax.jit(optimizer.update)(jnp.float32(jnp.nan), state)
    assert jax.tree.leaves(skipped.inner_state) == jax.tree.leaves(state.inner_state)


@pytest.mark.parametrize("limit", [0, -1, 2.0, True, 2**31, None])
def test_a_limit_is_a_positive_whole_number(limit):
    with pytest.raises(UsageError, match=r"whole number from 1 to 2\*\*31 - 1, got .*Leave it out"):
        apply_if_finite(optax.sgd(0.1), limit)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("dynamik", "Did you mean 'dynamic'"),
        (1024.0, r"got 1024\.0\. Write 'static\(1024\.0\)', or 'dynamic\(init_scale=1024\.0\)'"),
    ],
)
def test_a_scale_that_cannot_be_read_is_refused(given, message):
    with pytest.raises(ScaleError, match=message):
        apply_if_finite(optax.sgd(0.1), loss_scale=given)


def test_what_makes_a_transformation_is_none():
    with pytest.raises(UsageError, match=r"needs a transfor.* Write apply_if_finite\(sgd\(\.\.\."):
        apply_if_finite(optax.sgd, 10)
    with pytest.raises(UsageError, match=r", got 0\.1\. Write with_masters\(optax\.sgd\(0\.1"):
        with_masters(0.1)
