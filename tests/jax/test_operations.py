import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.errors import RefusedOperationError
from halfstep.jax import autocast
from tests.jax.programs import dtypes, equations

BF16, F16, F32 = "bfloat16", "float16", "float32"
X, W, B = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones(8)


def traced(function, *arguments, policy="mixed_bfloat16"):
    return jax.make_jaxpr(autocast(function, policy))(*arguments)


def low(function):
    """Returns a function of something that is in a low format by then."""
    return lambda x: function(x @ W)


# function of a low value, primitive, in what its real operands run, in what its results come out
OPERATIONS = [
    (lambda x: x @ W, "dot_general", BF16, BF16),
    (jnp.exp, "exp", F32, F32),
    (jnp.log, "log", F32, F32),
    (lambda x: x**3, "integer_pow", F32, F32),
    (jnp.square, "square", F32, F32),
    (lax.rsqrt, "rsqrt", F32, F32),
    (jnp.sum, "reduce_sum", F32, F32),
    (jnp.prod, "reduce_prod", F32, F32),
    (lambda x: lax.cumsum(x), "cumsum", F32, F32),
    (jnp.tanh, "tanh", BF16, BF16),
    (jax.nn.sigmoid, "logistic", BF16, BF16),
    (lambda x: jnp.maximum(x, 0.0), "max", BF16, BF16),
    (lambda x: x * 0.5, "mul", BF16, BF16),
    (lambda x: x / jnp.sqrt(64), "div", BF16, BF16),
    (lambda x: x + X, "add", F32, F32),
    (lambda x: -x, "neg", BF16, BF16),
    (lambda x: x.max(axis=0), "reduce_max", BF16, BF16),
    (lambda x: x.T, "transpose", BF16, BF16),
    (lambda x: jnp.concatenate([x, x]), "concatenate", BF16, BF16),
    (lambda x: jnp.concatenate([x, X]), "concatenate", F32, F32),
    (lambda x: lax.dynamic_update_slice(X, x[:1], (0, 0)), "dynamic_update_slice", F32, F32),
    (lambda x: X.at[0].add(x[0]), "scatter-add", F32, F32),
    (lambda x: jnp.zeros((4, 8)).at[0].set(x[0]), "scatter", BF16, BF16),
    (lambda x: jnp.fft.rfft(x), "fft", F32, "complex64"),
    (lambda x: jnp.linalg.cholesky(x.T @ x), "cholesky", F32, F32),
    (lambda x: lax.bitcast_convert_type(x, jnp.int32), "bitcast_convert_type", F32, "int32"),
    (lambda x: lax.reduce_precision(x, 5, 10), "reduce_precision", F32, F32),
    (lambda x: lax.sort(x), "sort", BF16, BF16),
]


@pytest.mark.parametrize(("function", "name", "operands", "results"), OPERATIONS)
def test_the_rules_choose_the_dtype(function, name, operands, results):
    closed = traced(lambda x: lax.stop_gradient(low(function)(x)), X)
    ran, came = dtypes(closed, name)[-1]
    assert {each for each in ran if each not in ("int32", "bool")} == {operands}
    assert set(came) == {results}


def test_a_convolution_is_low_but_for_float16_on_a_cpu():
    images, kernel = jnp.ones((1, 1, 8, 8)), jnp.ones((2, 1, 3, 3))

    def convolved(images, kernel):
        return lax.conv(images, kernel, (1, 1), "SAME")

    assert dtypes(traced(convolved, images, kernel), "conv_general_dilated") == [
        ((BF16, BF16), (BF16,))
    ]
    closed = traced(convolved, images, kernel, policy="mixed_float16")
    expected = F32 if jax.default_backend() == "cpu" else F16
    assert dtypes(closed, "conv_general_dilated") == [((expected, expected), (expected,))]


def test_a_bias_follows_the_product_and_its_gradient_is_summed_in_float32():
    def loss(x, w, b):
        return jnp.sum(jnp.tanh(x @ w + b))

    assert ((BF16, BF16), (BF16,)) in dtypes(traced(loss, X, W, B), "add")
    gradient = jax.make_jaxpr(jax.grad(autocast(loss), 2))(X, W, B)
    (last,) = [each for each in dtypes(gradient, "reduce_sum") if each[0] == (F32,)][-1:]
    assert last == ((F32,), (F32,))
    many = jnp.ones((5000, 8))
    # In bfloat16, a sum of ones ends at 256.
    ones = jax.grad(autocast(lambda b: jnp.sum(many @ W + b)))(B)
    np.testing.assert_array_equal(ones, 5000.0)


IMAGES, KERNEL = jnp.ones((1, 2, 4, 4)), jnp.ones((3, 2, 1, 1))


def convolved(bias):
    return lax.conv(IMAGES, KERNEL, (1, 1), "SAME")[0] + bias


def test_a_bias_of_one_image_follows_as_well_but_no_array_of_the_same_size():
    closed = traced(convolved, jnp.ones((3, 1, 1)))
    assert dtypes(closed, "add") == [((BF16, BF16), (BF16,))]
    assert dtypes(traced(convolved, jnp.ones((3, 4, 4))), "add") == [((F32, F32), (F32,))]
    edited = "mixed_bfloat16, rules=halfstep-1 + lax::add=full"
    closed = traced(convolved, jnp.ones((3, 1, 1)), policy=edited)
    assert dtypes(closed, "add") == [((F32, F32), (F32,))]


# How a row of 8 numbers gets into 5000 rows.
SPREAD = [
    lambda row: jnp.broadcast_to(row, (5000, 8)),
    lambda row: jnp.ones((5000, 8)) @ jnp.eye(8) * row[None],
    lambda row: row[None][jnp.zeros(5000, int)],
    lambda row: jnp.tanh(row[None][jnp.zeros(5000, int)] * 0.0) + row,
]


@pytest.mark.parametrize("spread", SPREAD)
def test_the_gradient_of_a_low_value_that_is_spread_is_summed_in_float32(spread):
    # Each of 5000 terms is 2**-8 of the sum: in bfloat16, they would not be seen any more.
    def loss(x):
        return jnp.sum(spread((x @ jnp.eye(8))[0]) @ jnp.eye(8))

    gradient = jax.grad(autocast(loss))(X)[0]
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, jax.grad(loss)(X)[0], rtol=2.0**-8)
    closed = jax.make_jaxpr(jax.grad(autocast(loss)))(X)
    sums = [each for each in equations(closed.jaxpr) if each.primitive.name == "reduce_sum"]
    pairs = [(each.invars[0].aval, each.outvars[0].aval) for each in sums]
    assert {str(of.dtype) for of, result in pairs if of.size > result.size} == {F32}


def test_a_constant_out_of_range_keeps_sums_wide_and_bounds_within():
    closed = traced(lambda x: (x @ W) + 1e-8, X, policy="mixed_float16")
    assert ((F32, F32), (F32,)) in dtypes(closed, "add")
    masked = autocast(lambda x: jnp.where(x > 0, -1e9, x @ W), "mixed_float16")
    assert jnp.all(masked(X) == -65504.0)
    assert dtypes(jax.make_jaxpr(masked)(X), "select_n") == [(("bool", F16, F16), (F16,))]
    infinite = autocast(lambda x: jnp.where(x > 0, -jnp.inf, x @ W), "mixed_float16")
    assert jnp.all(jnp.isneginf(infinite(X)))


def test_a_comparison_with_what_a_low_format_rounds_is_exact():
    rounded = 1.0 + 2.0**-12
    inside = autocast(lambda x: (x @ jnp.eye(8)) < rounded)
    assert jnp.all(inside(X))
    assert dtypes(jax.make_jaxpr(inside)(X), "lt") == [((F32, F32), ("bool",))]


def test_what_is_read_in_float32_is_not_rounded_before():
    closed = traced(lambda x: jnp.exp((x @ W) - (x @ W).max()), X)
    assert dtypes(closed, "sub") == [((F32, F32), (F32,))]
    closed = traced(lambda x: jnp.tanh((x @ W) - (x @ W).max()) @ W, X)
    assert dtypes(closed, "sub") == [((BF16, BF16), (BF16,))]


def test_masks_made_of_booleans_follow():
    closed = traced(lambda x: (x @ W) * (x > 0).astype(jnp.float32) @ W, X)
    assert dtypes(closed, "mul") == [((BF16, BF16), (BF16,))]


def test_masks_made_of_constants_follow_where_they_fit():
    def masked(x):
        return (x @ W) + jnp.where(jnp.arange(8) < 6, 0.0, -1e9)

    assert dtypes(traced(masked, X), "add") == [((BF16, BF16), (BF16,))]
    assert dtypes(traced(masked, X, policy="mixed_float16"), "add") == [((F32, F32), (F32,))]


def test_an_explicit_dtype_is_honoured():
    closed = traced(lambda x: jnp.matmul(x, W, preferred_element_type=jnp.bfloat16), X)
    assert dtypes(closed, "dot_general") == [((BF16, BF16), (BF16,))]
    half = X.astype(jnp.bfloat16)
    product = autocast(
        lambda x: lax.dot(x, x.T, preferred_element_type=jnp.float32), "mixed_float16"
    )
    assert dtypes(jax.make_jaxpr(product)(half), "dot_general") == [((F16, F16), (F32,))]
    closed = traced(lambda x: (x @ W).astype(jnp.float16).astype(jnp.float32) + X, X)
    assert dtypes(closed, "add") == [((F32, F32), (F32,))]
    assert ((BF16,), (F16,)) in dtypes(closed, "convert_element_type")


def test_an_explicit_precision_is_honoured():
    closed = traced(lambda x: jnp.matmul(x, W, precision="highest"), X)
    assert dtypes(closed, "dot_general") == [((F32, F32), (F32,))]


def test_integers_keys_and_complex_numbers_are_left_alone():
    key = jax.random.key(0)

    def mixed(x, number):
        noise = jax.random.normal(key, x.shape)
        return number @ number.T, noise, x.astype(jnp.complex64) @ W.astype(jnp.complex64)

    number = jnp.arange(8).reshape(2, 4)
    for plain, cast in zip(mixed(X, number), autocast(mixed)(X, number), strict=True):
        assert plain.dtype == cast.dtype
        np.testing.assert_array_equal(plain, cast)


def test_float64_is_left_alone():
    with jax.enable_x64(True):
        x = jnp.ones((4, 4), jnp.float64) / 3
        closed = traced(lambda x: jnp.exp(x @ x), x)
        assert dtypes(closed, "dot_general") == [(("float64", "float64"), ("float64",))]
        np.testing.assert_array_equal(autocast(lambda x: jnp.exp(x @ x))(x), jnp.exp(x @ x))


def test_weak_types_stay_weak():
    number = jnp.asarray(1.5)
    assert autocast(lambda x: x * 2.0)(number).weak_type
    assert not autocast(lambda x: x * 2.0)(X).weak_type


def test_rules_are_edited_by_operation_device_and_module():
    edited = "mixed_bfloat16, rules=halfstep-1 + lax::exp=keep + lax::tanh=full"
    closed = traced(lambda x: jnp.exp(jnp.tanh(x @ W) @ W), X, policy=edited)
    assert dtypes(closed, "exp") == [((BF16,), (BF16,))]
    assert dtypes(closed, "tanh") == [((F32,), (F32,))]

    def named(x):
        with jax.named_scope("encoder"), jax.named_scope("layer"):
            x = x @ W
        return jax.nn.relu(x) @ W

    edited = "mixed_bfloat16, rules=halfstep-1 + matmul[where=encoder.*]=full"
    both = dtypes(traced(named, X, policy=edited), "dot_general")
    assert both == [((F32, F32), (F32,)), ((BF16, BF16), (BF16,))]


def test_a_refused_operation_says_why():
    policy = 'mixed_bfloat16, rules=halfstep-1 + lax::erf_inv=refuse "Use the logistic function."'
    with pytest.raises(RefusedOperationError, match=r"lax::erf_inv in bfloat16: Use the logistic"):
        autocast(lax.erf_inv, policy)(X)


@pytest.mark.parametrize("number", [1e6, -1e9])
def test_numbers_beyond_the_low_format_are_no_warning(number):
    held = np.full((8, 8), number, np.float32)
    function = autocast(lambda x: jnp.where(x @ W > number, x @ held, 0.0), "mixed_float16")
    assert jnp.isinf(function(X)).all() == (number < 0)
