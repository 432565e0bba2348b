"""What ours does as jmp does, and what jmp gets wrong."""

import pickle

import jax
import jax.numpy as jnp
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import PolicyError, ScaleError, UsageError
from halfstep.jax import jmp
from tests.jax.compiling import Compiled

theirs = pytest.importorskip("jmp")


def adjust(value, finite):
    return value.adjust(finite)


@settings(max_examples=10)
@given(
    period=st.integers(1, 4),
    factor=st.sampled_from([2, 3, 4]),
    trace=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_traces_equal_those_of_jmp(period, factor, trace):
    def scales(module):
        value = module.DynamicLossScale(jnp.float32(2.0**15), jnp.int32(0), period, factor)
        _, values = jax.lax.scan(lambda v, f: (v.adjust(f),) * 2, value, jnp.array(trace))
        return values

    with jax.numpy_dtype_promotion("standard"):
        expected = scales(theirs)
    got = scales(jmp)
    assert got.loss_scale.tolist() == pytest.approx(expected.loss_scale.tolist(), rel=1e-5)
    assert got.counter.tolist() == expected.counter.tolist()


def test_the_floor_survives_trees_jit_pickles_and_copies():
    value = jmp.DynamicLossScale(jnp.float32(1024.0), min_loss_scale=jnp.float32(256.0))
    assert jax.tree.leaves(value) == [1024.0, 0]
    for other in (jax.tree.map(lambda leaf: leaf, value), pickle.loads(pickle.dumps(value))):
        assert other == value
    for _ in range(8):
        value = jax.jit(adjust)(value, jnp.bool_(False))
    assert value.loss_scale == 256.0


@pytest.mark.parametrize(
    "given", [jnp.float16(2**15), jnp.bfloat16(2**15), jnp.int32(2**15), 2**15]
)
def test_any_type_of_scale_works(given):
    value = jmp.DynamicLossScale(given, period=1)
    for _ in range(3):
        value = value.adjust(jnp.bool_(True))
    assert value.loss_scale == 2.0**18
    assert value.loss_scale.dtype == jnp.float32


def test_a_python_number_is_compiled_once():
    step = Compiled(adjust)
    value = jmp.DynamicLossScale(2.0**15, period=3)
    for finite in (True, True, True, False, True):
        value = step(value, finite)
    assert (step.traces, step.compilations) == (1, 1)


def test_a_floor_of_zero_does_not_let_the_scale_reach_zero():
    value = jmp.DynamicLossScale(4.0, min_loss_scale=0.0)
    for _ in range(200):
        value = value.adjust(False)
    assert value.loss_scale == 2.0**-126


def test_an_overflow_never_raises_a_scale_below_the_floor():
    assert jmp.DynamicLossScale(0.25).adjust(False).loss_scale == 0.25


def test_a_static_scale_given_as_an_array_passes_through_jit():
    value = jmp.StaticLossScale(jnp.float32(8.0))
    assert jax.jit(lambda value, x: value.scale(x))(value, 2.0) == 16.0


def test_a_half_loss_does_not_overflow():
    for value in (jmp.StaticLossScale(2.0**15), jmp.DynamicLossScale(2.0**15)):
        assert value.scale(jnp.float16(4.0)) == 2.0**17


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale": 0.0}, "needs a finite scale of at least"),
        ({"loss_scale": float("nan")}, "needs a finite scale of at least"),
        ({"factor": 0}, "growth_factor >= 1"),
        ({"factor": 0.5}, "growth_factor >= 1"),
        ({"period": 0}, "1 <= growth_interval"),
        ({"period": 2.5}, "growth_interval to be a whole number, got 2.5"),
        ({"min_loss_scale": -1.0}, "needs a finite min_loss_scale of at least 0, got -1.0"),
        ({"min_loss_scale": float("nan")}, "needs a finite min_loss_scale"),
    ],
)
def test_settings_that_would_destroy_a_run_are_refused(settings, message):
    with pytest.raises(ScaleError, match=message):
        jmp.DynamicLossScale(**{"loss_scale": 8.0} | settings)


def test_a_floor_must_be_known_while_tracing():
    with pytest.raises(UsageError, match="needs a min_loss_scale that is known while tracing"):
        jax.jit(lambda floor: jmp.DynamicLossScale(8.0, min_loss_scale=floor))(1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "p=f16=c",
            "Unknown dtype 'f16=c': a policy needs one of half, bf16, bfloat16, f16, float16, "
            "full, f32, float32, f64, float64. Did you mean 'f16'?",
        ),
        (
            "x=f16",
            "Unknown key 'x' in 'x=f16': get_policy needs pairs of params, compute or output and a "
            "dtype. Write for example 'params=f32,compute=f16'.",
        ),
        (
            "p=f16,c",
            "Unknown key 'c' in 'p=f16,c': get_policy needs pairs of params, compute or output and "
            "a dtype. Write for example 'params=f32,compute=f16'.",
        ),
    ],
)
def test_errors_of_policies(text, message):
    with pytest.raises(PolicyError) as caught:
        jmp.get_policy(text)
    assert str(caught.value) == message


TEXTS = ("half", "f32", "c=f16", "p=bf16,c=half", "params=full,compute=bf16,output=f16", "o=half")


@pytest.mark.parametrize("text", TEXTS)
def test_policies_equal_those_of_jmp_and_their_text_is_read_again(text):
    policy, expected = jmp.get_policy(text), theirs.get_policy(text)
    assert vars(policy) == vars(expected)
    assert str(policy) == str(expected)
    assert jmp.get_policy(str(policy)) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_a_policy_of_dtype_objects_has_a_text():
    policy = jmp.Policy(numpy.dtype("float32"), jnp.dtype("bfloat16"), "float16")
    assert str(policy) == "p=full,c=bf16,o=f16"
    assert str(policy.with_output_dtype(jnp.float8_e5m2)) == "p=full,c=bf16,o=float8_e5m2"


def test_casting_leaves_everything_but_floating_point_arrays():
    tree = {"w": numpy.ones(2, numpy.float32), "n": jnp.arange(2), "name": "w", "number": 1.0}
    cast = jmp.get_policy("p=f16,c=bf16,o=f32").cast_to_compute(tree)
    assert cast["w"].dtype == jnp.bfloat16
    assert [cast[key] is tree[key] for key in ("n", "name", "number")] == [True] * 3
