import functools
import gc

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl

from halfstep.jax import autocast
from tests.jax.programs import dtypes, equations

BF16, F32 = "bfloat16", "float32"
LOW = ((BF16, BF16), (BF16,))
KEYS = jax.random.split(jax.random.key(0), 2)
X, W = jax.random.normal(KEYS[0], (4, 8)), jax.random.normal(KEYS[1], (8, 8))


def traced(function, *arguments):
    return jax.make_jaxpr(autocast(function))(*arguments)


def agree(function, *arguments, tolerance=0.05):
    """Checks the result and the gradient against float32."""
    for ask in (function, jax.grad(lambda *args: jnp.sum(function(*args)))):
        plain, cast = ask(*arguments), autocast(ask)(*arguments)
        assert plain.dtype == cast.dtype
        np.testing.assert_allclose(cast, plain, atol=tolerance * float(jnp.abs(plain).max()))
    cast = jax.jit(jax.grad(lambda *args: jnp.sum(autocast(function)(*args))))(*arguments)
    np.testing.assert_allclose(cast, plain, atol=tolerance * float(jnp.abs(plain).max()))


def test_a_jitted_function_takes_and_gives_low_values():
    inner = jax.jit(lambda x: jnp.tanh(x @ W))
    closed = traced(lambda x: inner(inner(x)), X)
    assert dtypes(closed, "dot_general") == [LOW, LOW]
    second = [each for each in equations(closed.jaxpr) if each.primitive.name == "jit"][-1]
    assert str(second.invars[0].aval.dtype) == BF16
    assert str(second.outvars[0].aval.dtype) == BF16
    agree(lambda x: inner(inner(x)), X)


def test_jit_around_compiles_once():
    traces = []

    @jax.jit
    @autocast
    def step(x):
        traces.append(x.shape)
        return jnp.sum(jax.nn.softmax(x @ W))

    step(X), step(X + 1), step(X)
    assert len(traces) == 1
    assert step._cache_size() == 1


def test_jitted_functions_inside_are_rewritten_and_compiled_once(caplog):
    compiled = jax.jit(lambda x: jnp.tanh(x @ W))
    function = autocast(lambda x: jnp.sum(jnp.where(x > 0, compiled(x), 0.0)))
    other = X + 1.0
    function(X)
    with jax.log_compiles():
        function(X), function(other)
        assert "XLA compilation" not in caplog.text
        function(X[:2])
        assert "XLA compilation" in caplog.text


def test_checkpoint_recomputes_in_the_same_dtypes():
    def function(x):
        return jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ W) @ W))(x)

    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(autocast(function)(x))))(X)
    products = dtypes(closed, "dot_general")
    assert len(products) == 6
    assert set(products) == {LOW}
    assert any(each.primitive.name.startswith("remat") for each in equations(closed.jaxpr))
    agree(function, X)


def test_a_policy_of_checkpoint_is_kept():
    policy = jax.checkpoint_policies.dots_saveable
    function = autocast(jax.checkpoint(lambda x: jnp.tanh(jnp.tanh(x @ W) @ W), policy=policy))
    closed = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(function(x))))(X)
    assert len(dtypes(closed, "dot_general")) == 4


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x @ W, -1.0, 1.0)


@clipped.defjvp
def _(primals, tangents):
    # Not the derivative, so that it shows who was asked.
    return clipped(*primals), 3.0 * (tangents[0] @ W)


def test_a_forward_mode_rule_is_kept_and_follows_the_rules():
    function = autocast(lambda x: jnp.sum(clipped(x)))
    expected = 3.0 * jnp.sum(W, axis=1)
    np.testing.assert_allclose(jax.grad(function)(X)[0], expected, atol=0.05)
    closed = jax.make_jaxpr(lambda x, t: jax.jvp(function, (x,), (t,)))(X, X)
    assert set(dtypes(closed, "dot_general")) == {LOW}
    inside = jax.grad(lambda x: jax.jit(function)(x))(X)
    np.testing.assert_allclose(inside, jax.grad(function)(X), rtol=0.01)


def test_a_forward_mode_rule_may_take_and_give_integers():
    @jax.custom_jvp
    def counted(x, count):
        return x * count.astype(jnp.float32), count + 1

    @counted.defjvp
    def _(primals, tangents):
        out, count = counted(*primals)
        return (out, count), (5.0 * tangents[0], np.zeros((), jax.dtypes.float0))

    for policy in ("mixed_bfloat16", "mixed_float16"):
        function = autocast(lambda x: jnp.sum(counted(x @ jnp.eye(8), jnp.asarray(2))[0]), policy)
        assert jnp.all(jax.jit(jax.grad(function))(X) == 5.0)


@jax.custom_vjp
def weighed(x, w, count):
    return (x @ w) * count


def forward(x, w, count):
    return weighed(x, w, count), (x, w, jnp.exp(x))


def backward(kept, cotangent):
    x, w, power = kept
    return 3.0 * (cotangent @ w.T) * (power / power), x.T @ cotangent, None


weighed.defvjp(forward, backward)


def test_a_reverse_mode_rule_is_kept_and_follows_the_rules():
    def function(x, w):
        return jnp.sum(weighed(x @ jnp.eye(8), w, 2))

    for transformed in (
        autocast(function),
        jax.jit(autocast(function)),
        autocast(jax.jit(function)),
    ):
        of_x, of_w = jax.grad(transformed, (0, 1))(X, W)
        assert of_x.dtype == of_w.dtype == jnp.float32
        np.testing.assert_allclose(of_x[0], 3.0 * jnp.sum(W, axis=1), atol=0.1)
        np.testing.assert_allclose(of_w[:, 0], jnp.sum(X, axis=0), atol=0.1)
    closed = jax.make_jaxpr(jax.grad(autocast(function), (0, 1)))(X, W)
    assert set(dtypes(closed, "dot_general")) == {LOW}
    assert dtypes(closed, "exp") == [((F32,), (F32,))]


def test_a_reverse_mode_rule_with_symbolic_zeros_and_arguments_that_do_not_move():
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def scaled(name, x, w):
        return x @ w

    def forward(name, x, w):
        return x.value @ w.value, (x.value, w.value)

    def backward(name, kept, cotangent):
        return cotangent @ kept[1].T * 2.0, kept[0].T @ cotangent

    scaled.defvjp(forward, backward, symbolic_zeros=True)
    gradient = jax.grad(autocast(lambda x: jnp.sum(scaled("name", x, W))))(X)
    np.testing.assert_allclose(gradient[0], 2.0 * jnp.sum(W, axis=1), atol=0.05)


def test_shard_map():
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.P("rows"), jax.P()

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(rows, whole), out_specs=whole)
    def summed(x, w):
        return lax.psum(jnp.tanh(x @ w).sum(0), "rows")

    closed = traced(summed, X, W)
    assert dtypes(closed, "dot_general") == [LOW]
    assert dtypes(closed, "psum_invariant") == [((F32,), (F32,))]
    agree(summed, X, W)


def test_vmap_inside_and_outside():
    def row(x, w):
        return jnp.tanh(x @ w)

    agree(jax.vmap(row, (0, None)), X, W)
    outside = jax.vmap(autocast(row), (0, None))(X, W)
    np.testing.assert_array_equal(outside, autocast(jax.vmap(row, (0, None)))(X, W))


def test_forward_mode():
    function = autocast(lambda x: jnp.tanh(x @ W))
    value, tangent = jax.jvp(function, (X,), (X,))
    expected = jax.jvp(lambda x: jnp.tanh(x @ W), (X,), (X,))
    np.testing.assert_allclose(value, expected[0], atol=0.05)
    np.testing.assert_allclose(tangent, expected[1], atol=0.1)


def test_a_kernel_of_pallas_runs_as_it_is_written():
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.exp(x_ref[...])

    @jax.jit
    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(kernel, out_shape=shape, interpret=True)(x)

    closed = traced(lambda x: call(x @ W) @ W, X)
    assert dtypes(closed, "pallas_call") == [((F32,), (F32,))]
    np.testing.assert_allclose(autocast(lambda x: call(x @ W))(X), jnp.exp(X @ W), rtol=0.1)


def test_callbacks_get_what_they_were_written_for():
    def function(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.asarray(x) * 2, shape, x @ W)

    assert dtypes(traced(function, X), "pure_callback") == [((F32,), (F32,))]
    assert autocast(function)(X).dtype == jnp.float32


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_a_region_inside_another_has_its_own_policy(policy):
    around = autocast(lambda x: autocast(lambda x: x @ W, policy)(x) @ W)
    inner, outer = dtypes(jax.make_jaxpr(around)(X), "dot_general")
    dtype = policy.removeprefix("mixed_")
    assert inner == ((dtype, dtype), (dtype,))
    assert outer == LOW
    gradient = jax.make_jaxpr(
        autocast(jax.grad(lambda x: jnp.sum(autocast(lambda x: x @ W, policy)(x))))
    )
    assert {name for each in dtypes(gradient(X), "dot_general") for name in each[0]} == {dtype}


def in_everything(x):
    def turn(carry, _):
        return jax.nn.relu(jax.checkpoint(lambda x: clipped(x @ W))(carry)), carry.sum()

    x = lax.cond(x[0, 0] > 0, lambda x: lax.scan(turn, x, None, 2)[0], lambda x: x, x)
    return jnp.sum(weighed(x, W, 2))


@pytest.fixture
def few_to_collect():
    """Keeps what was there before out of the collections with which JAX looks for leaks."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_to_collect")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_programs_are_well_formed_and_hold_no_values_of_a_trace(policy):
    with jax.check_tracer_leaks(), jax.enable_checks(True):
        gradient = jax.jit(jax.grad(autocast(in_everything, policy, scale=1.0)))(X)
    assert jnp.all(jnp.isfinite(gradient))


def test_what_is_not_needed_any_more_is_freed():
    alive = []

    def function(x):
        for _ in range(6):
            x = jnp.tanh(x @ W)
            jax.debug.callback(lambda: alive.append(len(jax.live_arrays())))
        return x

    autocast(function)(X)
    jax.effects_barrier()
    assert max(alive) - min(alive) <= 2
