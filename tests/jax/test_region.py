import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.core import ScaleState
from halfstep.jax import apply_if_finite, autocast, loss_scale
from tests.jax.programs import dtypes

KEYS = jax.random.split(jax.random.key(0), 3)
X, W = jax.random.normal(KEYS[0], (16, 8)), jax.random.normal(KEYS[1], (8, 8)) / 3
Y = jax.random.normal(KEYS[2], (16, 8))
F16 = "mixed_float16"
SKIPPING = apply_if_finite(optax.sgd(0.1), loss_scale="dynamic(init_scale=16.0)")


def loss(w, x=X, y=Y):
    return jnp.mean((jnp.tanh(x @ w) @ w.T - y) ** 2)


def worst(ours, plain):
    """Returns the largest difference between trees, relative to the largest number."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


@pytest.mark.parametrize("factor", [1e-12, 1e-9, 1.0, 1e9, 1e12])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_gradients_are_true_whatever_the_loss_is_multiplied_by(factor, place):
    def outside(w):
        return factor * autocast(loss, F16)(w)

    cast = autocast(lambda w: factor * loss(w), F16) if place == "inside" else outside
    plain = jax.grad(lambda w: factor * loss(w))(W)
    for gradient in (jax.grad(cast)(W), jax.jit(jax.grad(cast))(W), jax.grad(jax.jit(cast))(W)):
        assert gradient.dtype == jnp.float32
        assert worst(gradient, plain) < 3e-3


def test_without_a_scale_they_underflow():
    gradient = jax.grad(autocast(lambda w: 1e-9 * loss(w), "mixed_float16, scale=none"))(W)
    assert jnp.all(gradient == 0)


def test_a_sum_over_many_elements_does_not_overflow():
    def summed(w):
        return jnp.sum((jnp.ones((4096, 8)) @ w - 1.0) ** 2)

    assert worst(jax.grad(autocast(summed, F16))(W), jax.grad(summed)(W)) < 3e-3


@pytest.mark.parametrize("scale", [0.125, 3.0, 2.0**40])
@pytest.mark.parametrize("factor", [1e-9, 1e6])
def test_in_float32_a_scale_changes_no_bit(scale, factor):
    def regularised(w, policy):
        return factor * autocast(loss, policy)(w) + 1e-3 * jnp.sum(w**2)

    gradient = jax.jit(jax.grad(regularised), static_argnums=1)
    scaled = gradient(W, f"float32, scale=static({scale})")
    np.testing.assert_array_equal(gradient(W, "float32"), scaled)


@pytest.mark.parametrize("factor", [1.0, 2.0**-40, 2.0**40])
def test_powers_of_two_change_no_bit_of_a_gradient_in_float16(factor):
    def gradient(scale, factor):
        return jax.grad(lambda w: factor * autocast(loss, F16, scale=scale)(w))(W)

    expected = gradient(256.0, 1.0)
    for scale in (256.0, 300.0, 2.0**12, 2.0**16):
        np.testing.assert_array_equal(gradient(scale, factor) / factor, expected)


def penalty(w, policy):
    return jnp.sum(jax.grad(autocast(loss, policy))(w) ** 2)


def curvature(w, policy):
    return jax.hessian(lambda b: autocast(loss, policy)(w, X + b))(jnp.ones(8))


@pytest.mark.parametrize("function", [jax.grad(penalty), curvature])
def test_second_derivatives_in_float16(function):
    plain = function(W, "float32")
    assert worst(function(W, F16), plain) < 0.02
    assert worst(jax.jit(function, static_argnums=1)(W, F16), plain) < 0.02


def test_forward_mode():
    value, tangent = jax.jvp(autocast(loss, F16), (W,), (W,))
    expected = jax.jvp(loss, (W,), (W,))
    np.testing.assert_allclose((value, tangent), expected, rtol=5e-3)
    jacobian = jax.jacfwd(autocast(lambda w: jnp.tanh(X @ w).sum(0), F16))(W)
    assert worst(jacobian, jax.jacfwd(lambda w: jnp.tanh(X @ w).sum(0))(W)) < 5e-3


def rows(policy):
    return jax.vmap(jax.grad(autocast(loss, policy)), (None, 0, 0))(W, X[:, None], Y[:, None])


def penalised_rows(policy):
    def penalty(w):
        each = jax.vmap(jax.grad(autocast(loss, policy)), (None, 0, 0))(w, X[:, None], Y[:, None])
        return jnp.mean(jnp.sum(each**2, axis=(1, 2)))

    return jax.grad(penalty)(W)


def summed_over_rows(policy):
    def total(w):
        each = jax.vmap(autocast(lambda w, x: jnp.sum(jnp.tanh(x @ w)), policy), (None, 0))
        return jnp.mean(each(w, X))

    return jax.grad(total)(W)


def summed_by_name(policy):
    def row(w, x):
        return lax.psum(jnp.sum(jnp.tanh(x @ w)), "rows")

    return jax.vmap(jax.grad(autocast(row, policy), 1), (None, 0), axis_name="rows")(W, X)


def scanned(policy):
    def total(w):
        def turn(before, row):
            return before + autocast(loss, policy)(w, row[None], row[None]), None

        return lax.scan(turn, jnp.float32(0), X)[0]

    return jax.grad(total)(W)


def checkpointed(policy):
    return jax.grad(jax.checkpoint(autocast(loss, policy)))(W)


AROUND = [rows, penalised_rows, summed_over_rows, summed_by_name, scanned, checkpointed]


@pytest.mark.parametrize("function", AROUND)
def test_vmap_scan_and_checkpoint_around(function):
    assert worst(function(F16), function("float32")) < 5e-3


def test_each_row_of_a_batch_is_scaled_by_itself():
    weights = jnp.logspace(-12.0, 12.0, 16)

    def of_rows(policy):
        weighed = autocast(lambda w, x, y, weight: weight * loss(w, x, y), policy)
        each = jax.vmap(jax.grad(weighed), (None, 0, 0, 0))
        return each(W, X[:, None], Y[:, None], weights)

    ours, plain = of_rows(F16), of_rows("float32")
    for one, other in zip(ours, plain, strict=True):
        assert worst(one, other) < 5e-3


def sharded(policy, weights):
    """Returns a loss over two devices, on whose halves it is of very different size."""

    def local(w, x, y, weight):
        inside = autocast(lambda w: loss(lax.pcast(w, "rows", to="varying"), x, y), policy)
        return lax.psum(jnp.sum(weight) * inside(w), "rows")

    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (jax.P(), *[jax.P("rows")] * 3)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=jax.P())
    return jax.jit(jax.grad(lambda w: mapped(w, X, Y, jnp.asarray(weights))))(W)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 1e-3), (1e-6, 1e6)])
def test_devices_that_add_up_gradients_agree_on_a_factor(weights):
    assert worst(sharded(F16, weights), sharded("float32", weights)) < 3e-3


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (512.0, 512.0),
        (jnp.float32(2.0), 2.0),
        (ScaleState(64.0), 64.0),
        (loss_scale("dynamic(init_scale=32.0)"), 32.0),
        (SKIPPING.init({}), 16.0),
        (None, 1024.0),
    ],
)
def test_the_scale_is_a_number_an_array_or_something_that_has_one(given, expected):
    # A gradient of 1 is brought just below the scale, which is half of it.
    seen = []

    @jax.custom_vjp
    def spy(x):
        return x

    # What is computed elsewhere is taken for a kernel, which is handed scaled numbers.
    def kernel(each):
        seen.append(np.asarray(each))
        return each

    def backward(kept, cotangent):
        like = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
        return (jax.pure_callback(kernel, like, cotangent),)

    spy.defvjp(lambda x: (x, None), backward)
    one = jnp.ones((1, 1))
    jax.grad(autocast(lambda w: spy(one @ w)[0, 0], F16, scale=given))(one)
    assert seen[0][0, 0] == expected / 2


def test_the_scale_may_be_traced_and_is_not_compiled_in():
    traces = []

    @jax.jit
    def step(w, scale):
        traces.append(1)
        return jax.grad(autocast(loss, F16, scale=scale))(w)

    usual, tiny = (step(W, jnp.float32(scale)) for scale in (1024.0, 2.0**-20))
    assert len(traces) == 1
    assert worst(usual, jax.grad(loss)(W)) < 3e-3
    # What is brought below 2**-20 has lost most of its bits in float16.
    assert worst(tiny, jax.grad(loss)(W)) > 3e-3


def test_products_in_the_backward_are_low():
    closed = jax.make_jaxpr(jax.grad(autocast(loss, F16)))(W)
    low = ("float16", "float16")
    assert {operands for operands, _ in dtypes(closed, "dot_general")} == {low}


def test_gradients_of_some_arguments_only():
    gradient = jax.grad(autocast(lambda w, x, count: jnp.sum(x @ w) * count, F16))(W, X, 2)
    assert worst(gradient, jax.grad(lambda w: jnp.sum(X @ w) * 2)(W)) < 3e-3
