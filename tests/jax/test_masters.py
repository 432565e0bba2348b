import math
from platform import machine

import jax
import jax.numpy as jnp
import numpy
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import UsageError
from halfstep.jax import apply_updates, master_params, with_masters
from tests.jax.compiling import Compiled
from tests.jax.masters import LAYOUTS, check, equal, tree
from tests.jax.optimizers import OPTIMIZERS
from tests.jax.processes import passes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_bit_for_bit_that_of_float32(name):
    check(name, "split", "bfloat16", apply_updates, jit=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["adam", "adafactor", "injected"])
def test_so_it_is_with_masters_beside_the_parameters(name, dtype):
    check(name, "cast", dtype, optax.apply_updates, jit=False)


@pytest.mark.slow
@pytest.mark.skipif(machine() not in ("x86_64", "AMD64"), reason="needs a flag for x86 processors")
def test_so_it_is_compiled():
    assert passes("compiled_masters.py", flags="--xla_cpu_max_isa=AVX", optimized=True)


def stepper(optimizer, apply=apply_updates):
    """Returns a compiled step that adds given updates to the masters."""

    def step(params, state, update):
        updates, state = optimizer.update(update, state, params)
        return apply(params, updates), state

    return Compiled(step)


def added():
    """The optimizer whose updates are the gradients."""
    return optax.identity()


STEP = stepper(with_masters(added(), layout="split"))
EXPONENTS = st.integers(-90, 90)
JUMPS = st.sampled_from([-1.0, -1.0 + 2.0**-24, -1.0 - 2.0**-23, -2.0, 1e-9, 1e9, -0.999, 3.0])


@settings(max_examples=40)
@given(exponent=EXPONENTS, jump=JUMPS, noise=EXPONENTS, seed=st.integers(0, 99))
def test_whatever_an_update_does_split_masters_are_those_of_float32(exponent, jump, noise, seed):
    random = numpy.random.default_rng(seed)
    start = (random.standard_normal(64) * 2.0**exponent).astype("bfloat16").astype("float32")
    small = (random.standard_normal(64) * 2.0 ** (exponent - 12)).astype("float32")
    far = (random.standard_normal(64) * 2.0**noise).astype("float32")
    params, master = jnp.asarray(start).astype(jnp.bfloat16), start
    state = with_masters(added(), layout="split").init(params)
    for update in (small, (master + small) * numpy.float32(jump), far):
        params, state = STEP(params, state, update)
        master = master + update
        equal(master_params(state, params), jnp.asarray(master))


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_small_updates_are_not_lost(layout, dtype):
    optimizer = with_masters(optax.sgd(1.0), layout)
    step, params = stepper(optimizer), jnp.ones(4, dtype)
    state = optimizer.init(params)
    for _ in range(100):
        params, state = step(params, state, jnp.full(4, 2.0**-13, dtype))
    assert master_params(state, params).tolist() == [1.0 - 100 * 2.0**-13] * 4
    assert params.tolist() == pytest.approx([0.98779296875] * 4, rel=2.0**-8)
    assert (step.traces, step.compilations) == (1, 1)


def test_the_state_holds_16_bits_for_a_bfloat16_and_nothing_for_a_float32():
    params = tree("bfloat16", 0)
    masters = with_masters(optax.adam(1e-3), "split").init(params).masters
    assert masters["b"] is None
    assert {leaf.dtype.name for leaf in jax.tree.leaves(masters)} == {"int16"}
    state = with_masters(optax.adam(1e-3), "cast").init(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.masters)} == {"float32"}
    moments = jax.tree.leaves(optax.tree.get(state, "nu"))
    assert {leaf.dtype.name for leaf in moments} == {"float32"}


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_parameters_that_somebody_else_wrote_count(layout, dtype):
    optimizer = with_masters(optax.sgd(1.0), layout)
    params = jnp.ones(3, dtype)
    state = optimizer.init(params)
    updates, state = optimizer.update(jnp.full(3, 2.0**-12, dtype), state, params)
    params = apply_updates(params, updates).at[1].set(0.0).at[2].set(5.0)
    read = master_params(state, params)
    assert read[0] == 1.0 - 2.0**-12
    assert read[1:].tolist() == pytest.approx([0.0, 5.0], abs=1e-30, rel=2.0**-8)


@pytest.mark.parametrize("layout", ["cast", "split"])
def test_zeros_infinities_and_nans_do_not_spread(layout):
    optimizer = with_masters(added(), layout)
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 3.3895313892515355e38]
    params = jnp.array(values, jnp.bfloat16)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(jnp.zeros(6), state, params)
        params = apply_updates(params, updates)
        equal(params[:4], jnp.array(values[:4], jnp.bfloat16))
        assert jnp.isnan(params[4])
        assert params[5] == values[5]


def test_a_master_beyond_the_largest_bfloat16_is_kept():
    optimizer = with_masters(added(), "split")
    largest = 3.4028234663852886e38
    params = jnp.array([3.3895313892515355e38], jnp.bfloat16)
    state = optimizer.init(params)
    update = jnp.array([largest - 3.3895313892515355e38])
    updates, state = optimizer.update(update, state, params)
    params = apply_updates(params, updates)
    assert params.tolist() == [math.inf]
    assert master_params(state, params).tolist() == [largest]


@pytest.mark.parametrize("layout", ["cast", "split"])
def test_it_composes(layout):
    mask = {"w": True, "v": [False], "b": True}
    params, grads = tree("bfloat16", 0), tree("bfloat16", 1)
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.masked(with_masters(optax.adam(1e-3), layout), mask),
    )
    steps = optax.MultiSteps(with_masters(optax.adam(1e-3), layout), 2)
    with jax.numpy_dtype_promotion("standard"):
        for optimizer in (chain, steps):
            state, now = optimizer.init(params), params
            for _ in range(4):
                updates, state = jax.jit(optimizer.update)(grads, state, now)
                now = apply_updates(now, updates)
            assert jax.tree.map(lambda leaf: leaf.dtype, now) == jax.tree.map(
                lambda leaf: leaf.dtype, params
            )
            assert not jnp.array_equal(now["w"], params["w"])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: with_masters(added(), "splitt"),
            "with_masters needs layout to be 'cast' or 'split', got 'splitt'. "
            "Did you mean 'split'?",
        ),
        (
            lambda: with_masters(added(), "split").init({"w": jnp.ones(2, jnp.float16)}),
            "with_masters needs parameters in bfloat16 or float32 in this layout, got float16 at "
            "['w']. Write layout='cast'.",
        ),
        (
            lambda: with_masters(added()).init(jnp.ones(2, jnp.float8_e5m2)),
            "with_masters needs parameters in float16, bfloat16 or float32 in this layout, got "
            "float8_e5m2 at the root. Write another dtype.",
        ),
        (
            lambda: with_masters(added()).update(jnp.ones(2), None),
            "with_masters needs the parameters, got None. "
            "Write optimizer.update(grads, state, params).",
        ),
        (
            lambda: with_masters(added()).update(
                jnp.ones(2), with_masters(added()).init(jnp.ones(2, jnp.bfloat16)), jnp.ones(2)
            ),
            "with_masters needs the parameters in the dtypes that init() got, got float32 at the "
            "root. Apply updates with halfstep.jax.apply_updates, which keeps dtypes.",
        ),
        (
            lambda: master_params(added().init(1.0), jnp.ones(2)),
            "master_params needs exactly one WithMastersState in the state, got 0. Pass the state "
            "of an optimizer that was wrapped in with_masters once.",
        ),
    ],
)
def test_errors(build, message):
    with pytest.raises(UsageError) as caught:
        build()
    assert str(caught.value) == message
