import copy
import math
import pickle

import jax
import jax.numpy as jnp
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep import LossScale, ScaleState
from halfstep.errors import NotScalarError, ScaleError, UsageError
from halfstep.jax import DynamicLossScale, NoOpLossScale, StaticLossScale, loss_scale
from tests.conformance.traces import TRACES
from tests.core.strategies import LOSS_SCALES
from tests.jax.compiling import Compiled

SCALES = (NoOpLossScale(), StaticLossScale(1024.0), DynamicLossScale("dynamic(init_scale=8.0)"))


def adjust(value, finite):
    return value.adjust(finite)


@pytest.mark.parametrize("step", [adjust, jax.jit(adjust)], ids=["eager", "jit"])
@pytest.mark.parametrize("trace", TRACES, ids=str)
def test_jax_replays(trace, step):
    value = DynamicLossScale(trace.rule)
    for finite, expected in trace:
        value = step(value, jnp.bool_(finite))
        assert value.state == expected


@settings(max_examples=25)
@given(rule=LOSS_SCALES, trace=st.lists(st.booleans(), min_size=60, max_size=60))
def test_a_scan_agrees_with_core_on_random_traces(rule, trace):
    def step(value, finite):
        value = value.adjust(finite)
        return value, jax.tree.leaves(value)

    _, leaves = jax.lax.scan(step, DynamicLossScale(rule), jnp.array(trace))
    state = rule.init()
    for finite, *numbers in zip(trace, *(leaf.tolist() for leaf in leaves), strict=True):
        state = rule.next(state, finite=finite)
        assert ScaleState(*numbers) == state


def test_it_compiles_once_over_growth_back_off_and_skips():
    step = Compiled(adjust)
    value = DynamicLossScale("dynamic(growth_interval=2)", loss_scale=2.0**15)
    for finite in (True, True, False, True, False, False, True, True):
        value = step(value, finite)
    assert (step.traces, step.compilations) == (1, 1)
    assert value.state.scale == 2.0**14


@pytest.mark.parametrize("given", [2, 2.0, numpy.float16(2), numpy.array(2), jnp.float16(2)])
def test_leaves_have_fixed_strong_dtypes_whatever_was_given(given):
    value = DynamicLossScale(loss_scale=given, finite_steps=numpy.int64(1))
    for each in (value, value.adjust(True), jax.jit(adjust)(value, False)):
        leaves = jax.tree.leaves(each)
        assert [leaf.dtype.name for leaf in leaves] == ["float32", "int32", "int32"]
        assert not any(leaf.weak_type for leaf in leaves)


def test_the_tree_is_three_leaves_and_the_rule_is_structure():
    value = DynamicLossScale("dynamic(hysteresis=3)", 4.0, 5, 2)
    assert jax.tree.leaves(value) == [4.0, 5, 2]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(value)]
    names = [jax.tree_util.keystr(path) for path in paths]
    assert names == [".loss_scale", ".finite_steps", ".overflows"]
    assert jax.tree.structure(value) != jax.tree.structure(DynamicLossScale())
    assert jax.tree.map(lambda leaf: leaf, value) == value


@pytest.mark.parametrize("value", SCALES, ids=lambda value: type(value).__name__)
def test_pickles_and_copies_are_equal(value):
    for other in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert other == value
        assert jax.tree.structure(other) == jax.tree.structure(value)


@pytest.mark.parametrize("value", SCALES, ids=lambda value: type(value).__name__)
def test_scales_pass_through_transformations(value):
    value = jax.jit(adjust)(value, jnp.bool_(True))
    assert float(jax.jit(lambda value, x: value.unscale(value.scale(x)))(value, 3.0)) == 3.0
    gradient = jax.grad(lambda x: value.scale(x * x))(jnp.float32(3.0))
    assert float(value.unscale(gradient)) == 6.0


def test_vmap_keeps_a_scale_for_each_element():
    values = jax.vmap(lambda scale: DynamicLossScale(loss_scale=scale))(jnp.array([4.0, 8.0]))
    values = jax.vmap(adjust)(values, jnp.array([True, False]))
    assert values.loss_scale.tolist() == [4.0, 4.0]
    assert values.finite_steps.tolist() == [1, 0]


def test_half_values_are_scaled_in_float32_and_do_not_overflow():
    value = DynamicLossScale()
    scaled = value.scale({"loss": jnp.float16(8.0), "aux": jnp.bfloat16(1.0)})
    assert scaled["loss"].dtype == scaled["aux"].dtype == jnp.float32
    assert scaled["loss"].item() == 8.0 * 65536


def test_small_half_gradients_are_true_after_unscaling():
    smallest = jnp.finfo(jnp.float16).smallest_subnormal
    assert DynamicLossScale().unscale(jnp.float16(smallest)).item() == 2.0**-24 / 65536


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-16, 1.0, 2.0**64, 2.0**65, 2.0**127])
def test_unscaling_by_a_power_of_two_is_exact(scale):
    value = DynamicLossScale(loss_scale=scale)
    numbers = jnp.array([1.0, 1.5, 1.0 + 2.0**-23]) * min(1.0, 2.0**126 / scale)
    for unscale in (DynamicLossScale.unscale, jax.jit(DynamicLossScale.unscale)):
        assert unscale(value, value.scale(numbers)).tolist() == numbers.tolist()


def test_other_scales_cost_at_most_one_rounding_more():
    numbers = numpy.arange(1, 1000, dtype=numpy.float32)
    got = jax.jit(DynamicLossScale(loss_scale=3.0).unscale)(numbers)
    numpy.testing.assert_array_max_ulp(numpy.asarray(got), numbers / numpy.float32(3.0), 1)


def test_keys_and_gradients_of_integers_are_left_alone():
    key, none = jax.random.key(0), numpy.zeros(2, jax.dtypes.float0)
    tree = {"key": key, "none": none, "empty": None}
    assert DynamicLossScale().unscale(tree) == StaticLossScale(2.0).scale(tree) == tree


def test_complex_values_stay_complex():
    scaled = StaticLossScale(2.0).scale(jnp.complex64(1 + 2j))
    assert scaled.dtype == jnp.complex64
    assert scaled.item() == 2 + 4j


def test_at_floor():
    value = DynamicLossScale("dynamic(min_scale=1.0)", loss_scale=2.0)
    assert not value.at_floor
    assert value.adjust(False).at_floor
    assert not DynamicLossScale("none").at_floor


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 2.0**-127, [1.0, 0.0]])
@pytest.mark.parametrize(
    "kind", [StaticLossScale, lambda scale: DynamicLossScale(loss_scale=scale)]
)
def test_scales_that_would_destroy_a_run_are_refused(kind, scale):
    with pytest.raises(
        ScaleError, match=r"needs a finite scale of at least 2\*\*-126, got .*Write"
    ):
        kind(jnp.array(scale) if isinstance(scale, list) else scale)


def test_a_static_scale_has_a_reciprocal():
    with pytest.raises(ScaleError, match=r"at most 2\*\*126, got 1.7014118346046923e\+38. Write"):
        StaticLossScale(2.0**127)


def test_one_boolean_is_needed():
    with pytest.raises(NotScalarError) as caught:
        DynamicLossScale().adjust(jnp.array([True, False]))
    assert str(caught.value) == (
        "adjust needs one boolean (expected boolean scalar), got bool of shape (2,). "
        "Write for example all_finite(grads)."
    )
    with pytest.raises(NotScalarError, match="got float32 of shape"):
        DynamicLossScale().adjust(jnp.float32(1.0))


def test_a_static_scale_must_be_known():
    with pytest.raises(UsageError, match="Create it outside of the transformed function"):
        jax.jit(lambda scale: StaticLossScale(scale).scale(1.0))(2.0)


def test_the_form_follows_from_the_rule():
    assert loss_scale(None) == loss_scale("none") == loss_scale(LossScale.none()) == SCALES[0]
    assert loss_scale("static(1024.0)") == SCALES[1]
    assert loss_scale({"init_scale": 8.0}) == SCALES[2]
    assert all(loss_scale(value) is value for value in SCALES)
    with pytest.raises(ScaleError, match="Did you mean 'dynamic'"):
        loss_scale("dynamc")
