import jax
import jax.numpy as jnp
import numpy
import pytest

from halfstep.errors import NotScalarError, UsageError
from halfstep.jax import all_finite, select_tree
from halfstep.jax._finite import nonfinite_kinds

BAD = (jnp.inf, -jnp.inf, jnp.nan)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("bad", BAD)
def test_one_bad_number_is_found(dtype, bad):
    tree = {"a": jnp.ones((2, 3), dtype), "b": [jnp.ones(4, dtype)]}
    assert all_finite(tree)
    tree["b"][0] = tree["b"][0].at[3].set(jnp.asarray(bad).astype(dtype))
    assert not all_finite(tree)
    assert not jax.jit(all_finite)(tree)


@pytest.mark.parametrize("tree", [None, {}, [], jnp.arange(3), numpy.zeros(2, jax.dtypes.float0)])
def test_what_cannot_be_anything_else_is_finite(tree):
    assert all_finite(tree)
    assert all_finite({"tree": tree, "key": jax.random.key(0)})


def test_numbers_and_empty_arrays_count():
    assert all_finite([1.0, jnp.zeros(0)])
    assert not all_finite([float("nan"), jnp.zeros(0)])


def test_kinds_of_each_leaf():
    tree = [
        jnp.ones(2),
        jnp.array([1.0, jnp.inf]),
        jnp.array([jnp.nan, 1.0]),
        jnp.array([jnp.nan, -jnp.inf], jnp.float16),
        jnp.arange(2),
    ]
    assert nonfinite_kinds(tree).tolist() == [0, 1, 2, 3, 0]
    assert nonfinite_kinds({}).shape == (0,)


def test_a_tree_is_selected_by_the_predicate():
    a = {"w": jnp.ones(2, jnp.float16), "n": jnp.int32(1), "key": jax.random.key(1), "none": None}
    b = {"w": jnp.zeros(2, jnp.float16), "n": jnp.int32(2), "key": jax.random.key(2), "none": None}
    for pred, expected in ((True, a), (jnp.bool_(False), b)):
        got = jax.jit(select_tree)(pred, a, b)
        assert got["w"].tolist() == expected["w"].tolist()
        assert got["n"] == expected["n"]
        assert got["key"] == expected["key"]


def test_nothing_of_the_other_tree_comes_through():
    good, bad = jnp.ones(3), jnp.full(3, jnp.nan)
    assert select_tree(True, good, bad).tolist() == [1.0, 1.0, 1.0]


def test_trees_that_differ_are_named():
    with pytest.raises(UsageError) as caught:
        select_tree(True, {"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.float16)})
    assert str(caught.value) == (
        "select_tree needs trees of the same shapes and dtypes, got float32[2] and float16[2] at "
        "['w']. Convert one of them, as with astype."
    )


def test_trees_of_other_structure_are_refused():
    with pytest.raises(UsageError, match="two trees of the same structure"):
        select_tree(jnp.bool_(True), {"a": jnp.ones(1)}, {"b": jnp.ones(1)})


def test_the_predicate_is_one_boolean():
    with pytest.raises(NotScalarError, match=r"got bool of shape \(1,\)"):
        select_tree(jnp.ones(1, bool), None, None)
    with pytest.raises(AssertionError, match="got int32 of shape"):
        select_tree(1, None, None)
