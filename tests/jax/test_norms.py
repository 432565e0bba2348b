import jax
import jax.numpy as jnp
import numpy
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfstep.errors import UsageError
from halfstep.jax import clip_by_global_norm, global_norm

MOST = float(numpy.finfo("float32").max)


@given(
    exponents=st.lists(st.integers(-60, 127), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_the_norm_is_that_of_float64(exponents, seed):
    random = numpy.random.default_rng(seed)
    tree = [(random.random(5) * 2.0**power).astype("float32") for power in exponents]
    expected = numpy.sqrt(sum(numpy.square(leaf.astype("float64")).sum() for leaf in tree))
    norm = float(global_norm(tree))
    assert norm == pytest.approx(min(expected, MOST), rel=1e-5)


def test_usual_numbers_have_the_norm_that_optax_gives():
    tree = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.arange(3.0)}
    assert global_norm(tree) == optax.tree.norm(tree)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_the_largest_numbers_have_a_finite_norm(dtype, wrap):
    most = float(jnp.finfo(dtype).max)
    norm = wrap(global_norm)({"w": jnp.full(4, most, dtype), "b": jnp.zeros((), dtype)})
    assert norm.dtype == jnp.float32
    assert norm == pytest.approx(min(2.0 * most, MOST), rel=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("others", [1.0, 6e4])
def test_numbers_that_are_not_finite_stay_visible(dtype, bad, others):
    tree = [jnp.full(4, others, dtype), jnp.array([1.0, bad]).astype(dtype)]
    norm = global_norm(tree)
    assert jnp.isnan(norm) if jnp.isnan(bad) else norm == jnp.inf


def test_large_finite_numbers_do_not_hide_an_infinity():
    assert global_norm(jnp.array([3e38, jnp.inf, 3e38])) == jnp.inf
    assert jnp.isnan(global_norm(jnp.array([3e38, jnp.nan, 3e38])))


def test_other_leaves():
    assert global_norm({}) == 0.0
    assert global_norm({"none": None, "n": jnp.array([3, 4])}) == 5.0
    assert global_norm(jnp.array([3 + 4j], jnp.complex64)) == 5.0
    assert global_norm([jax.random.key(0), numpy.zeros(2, jax.dtypes.float0)]) == 0.0


def test_doubles_have_a_norm_in_double_precision():
    with jax.enable_x64(True):
        norm = global_norm([jnp.array([3e200, 4e200]), jnp.float16(1.0)])
        assert norm.dtype == jnp.float64
        assert norm == pytest.approx(5e200, rel=1e-14)


def test_it_has_a_gradient():
    values = jnp.array([3.0, 4.0])
    assert jax.grad(global_norm)(values).tolist() == pytest.approx([0.6, 0.8])
    assert jax.grad(global_norm)(values * 1e30).tolist() == pytest.approx([0.6, 0.8])
    assert jax.vmap(global_norm)(jnp.stack([values, values * 1e30])).tolist() == [
        5.0,
        pytest.approx(5e30),
    ]


def clip(updates, max_norm):
    transformation = clip_by_global_norm(max_norm)
    return transformation.update(updates, transformation.init(updates))[0]


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e3])
def test_clipping_float32_gives_what_optax_gives(max_norm):
    updates = {"w": jax.random.normal(jax.random.key(0), (64, 32)), "b": jnp.arange(3.0)}
    theirs = optax.clip_by_global_norm(max_norm).update(updates, optax.EmptyState())[0]
    for one, other in zip(*map(jax.tree.leaves, (clip(updates, max_norm), theirs)), strict=True):
        numpy.testing.assert_allclose(one, other, rtol=1e-6)


def test_half_updates_are_clipped_to_the_norm_and_keep_their_dtype():
    updates = {"w": jnp.full(10000, 6e4, jnp.float16), "b": jnp.zeros(1)}
    clipped = clip(updates, 1.0)
    assert clipped["w"].dtype == jnp.float16
    assert clipped["b"].dtype == jnp.float32
    assert global_norm(clipped) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_updates_whose_norm_has_a_subnormal_reciprocal_are_clipped(wrap):
    clipped = wrap(lambda updates: clip(updates, 1.0))(jnp.full(2, 2.0**127))
    assert global_norm(clipped) == pytest.approx(1.0, rel=1e-5)


def test_updates_that_are_not_finite_stay_as_they_are():
    updates = [jnp.array([1.0, jnp.inf]), jnp.array([3.0, jnp.nan]), jnp.full(2, 5.0)]
    clipped = clip(updates, 1.0)
    for one, other in zip(clipped, updates, strict=True):
        numpy.testing.assert_array_equal(one, other)


def test_the_norm_may_be_a_hyperparameter():
    # optax promotes dtypes there.
    with jax.numpy_dtype_promotion("standard"):
        transformation = optax.inject_hyperparams(clip_by_global_norm)(max_norm=1.0)
        updates = jnp.array([3.0, 4.0])
        clipped, _ = transformation.update(updates, transformation.init(updates))
    assert clipped.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("max_norm", [0, -1.0, float("nan"), "1", None])
def test_a_norm_that_makes_no_sense_is_refused(max_norm):
    with pytest.raises(UsageError) as caught:
        clip_by_global_norm(max_norm)
    assert str(caught.value) == (
        f"clip_by_global_norm needs max_norm > 0, got {max_norm!r}. Write for example 1.0."
    )
