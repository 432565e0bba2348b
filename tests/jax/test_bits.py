import jax
import jax.numpy as jnp
import ml_dtypes
import numpy
import pytest
from jax import lax

from halfstep.jax._transformations._bits import merge, rounded, same_bits, split
from tests.reference import master_bits

# Every upper half, with the lower halves at which something changes.
LOWER = numpy.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], numpy.int32)
UPPER = numpy.arange(-(2**15), 2**15, dtype=numpy.int32)
MASTERS = (UPPER[:, None] * 2**16 + LOWER).reshape(-1).view(numpy.float32)


def bits(values, dtype=numpy.int32):
    return numpy.asarray(values).view(dtype)


def same(a, b):
    """Compares bits, with the same ones for every NaN."""
    a, b = (numpy.where(numpy.isnan(each), numpy.float32(numpy.nan), each) for each in (a, b))
    numpy.testing.assert_array_equal(bits(a.astype("f4")), bits(b.astype("f4")))


@pytest.mark.parametrize("function", [split, jax.jit(split)], ids=["eager", "jit"])
def test_splitting_equals_the_reference(function):
    low, remainder = map(numpy.asarray, function(MASTERS))
    expected, rest = master_bits.split_bfloat16(MASTERS)
    known = ~numpy.isnan(MASTERS)
    upper = bits(low.astype(ml_dtypes.bfloat16), numpy.int16)
    numpy.testing.assert_array_equal(upper[known], expected[known])
    numpy.testing.assert_array_equal(remainder[known], rest[known])
    assert numpy.isnan(low[~known]).all()


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_every_master_is_given_back_by_a_bfloat16_and_16_bits(wrap):
    low, remainder = wrap(split)(MASTERS)
    same(numpy.asarray(wrap(merge)(low.astype(jnp.bfloat16), remainder)), MASTERS)


def test_a_remainder_that_would_make_a_nan_is_ignored():
    low = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf, jnp.nan], jnp.bfloat16)
    for remainder in (-1, 1, -(2**15)):
        merged = merge(low, jnp.full(5, remainder, jnp.int16))
        assert jnp.isnan(merged).tolist() == [False] * 4 + [True]


@pytest.mark.parametrize(
    "function", [rounded, jax.jit(rounded, static_argnums=1)], ids=["eager", "jit"]
)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_rounding_equals_numpys(function, name):
    # Devices take subnormal float32 for zero, so they are left out.
    masters = MASTERS[~((numpy.abs(MASTERS) < 2.0**-126) & (MASTERS != 0.0))]
    with numpy.errstate(over="ignore", invalid="ignore"):
        expected = masters.astype(numpy.float16 if name == "float16" else ml_dtypes.bfloat16)
    same(numpy.asarray(function(masters, name)), expected.astype(numpy.float32))


def test_rounding_of_small_float16_is_to_even():
    near = numpy.arange(0, 2.0**-13, 2.0**-27, dtype=numpy.float32)
    for masters in (near, -near):
        same(numpy.asarray(rounded(masters, "float16")), masters.astype("f2").astype("f4"))


def test_zeros_of_different_sign_differ():
    zeros = jnp.array([0.0, -0.0])
    assert same_bits(zeros, -zeros).tolist() == [False, False]
    assert same_bits(zeros, lax.neg(-zeros)).tolist() == [True, True]
