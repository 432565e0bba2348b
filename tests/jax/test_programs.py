"""Random small programs: what the rules do to them, and that nothing else happens to them."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp

from halfstep.core import FORMATS
from halfstep.jax import autocast
from tests.jax.programs import dtypes, equations

X = jax.random.normal(jax.random.key(0), (4, 8))
# Orthogonal, so that no program makes numbers or errors much larger.
W = jnp.linalg.qr(jax.random.normal(jax.random.key(1), (8, 8)))[0]
B = jnp.linspace(-0.5, 0.5, 8)
EPSILON = {each.name: each.epsilon for each in FORMATS}
SIZES = settings(max_examples=12)


@jax.custom_vjp
def halved(x, w):
    return 0.5 * (x @ w)


halved.defvjp(lambda x, w: (halved(x, w), (x, w)), lambda kept, ct: (0.5 * ct @ kept[1].T, None))


def convolved(x, w):
    return lax.conv(x[None, None], w[None, None, :3, :3], (1, 1), "SAME")[0, 0] / 3


STEPS = {
    "product": lambda x, w, b: x @ w,
    "layer": lambda x, w, b: jnp.tanh(x @ w + b),
    "convolution": lambda x, w, b: convolved(x, w),
    "sine": lambda x, w, b: jnp.sin(x),
    "bell": lambda x, w, b: jnp.exp(-jnp.square(x)),
    "softplus": lambda x, w, b: jax.nn.softplus(x) * 0.5,
    "silu": lambda x, w, b: jax.nn.silu(x),
    "softmax": lambda x, w, b: jax.nn.softmax(x),
    "centred": lambda x, w, b: x - jnp.mean(x, axis=1, keepdims=True),
    "total": lambda x, w, b: x + 0.1 * jnp.sum(x, axis=0),
    "masked": lambda x, w, b: jnp.where(jnp.arange(8) < 6, x, -0.25),
    "turned": lambda x, w, b: jnp.concatenate([x[2:], x[:2]])[:, ::-1],
    "rule": lambda x, w, b: halved(x, w),
}


def in_scan(inner):
    return lambda x, w, b: lax.scan(lambda at, row: (inner(at, w, b) + row, None), x, B[:2])[0]


def in_while(inner):
    return lambda x, w, b: lax.fori_loop(0, 2, lambda turn, at: inner(at, w, b), x)


def in_cond(inner):
    return lambda x, w, b: lax.cond(w[0, 0] < 9.0, inner, lambda x, w, b: x, x, w, b)


def in_vmap(inner):
    return lambda x, w, b: jax.vmap(lambda row: inner(row[None].repeat(4, 0), w, b)[0])(x)


AROUND = {
    "jit": jax.jit,
    "scan": in_scan,
    "while": in_while,
    "cond": in_cond,
    "checkpoint": jax.checkpoint,
    "vmap": in_vmap,
}


def composed(parts):
    """Returns a function that does one after the other."""

    def run(x, w, b):
        for part in parts:
            x = part(x, w, b)
        return x

    return run


FLAT = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3).map(
    lambda names: composed([STEPS[name] for name in names])
)
PARTS = st.one_of(FLAT, st.tuples(st.sampled_from(sorted(AROUND)), FLAT))
PROGRAMS = st.lists(PARTS, min_size=1, max_size=3).map(
    lambda parts: composed(
        [AROUND[part[0]](part[1]) if isinstance(part, tuple) else part for part in parts]
    )
)


def loss(program):
    return lambda x, w, b: jnp.sum(jnp.sin(program(x, w, b)))


@SIZES
@given(PROGRAMS)
def test_without_rules_nothing_happens(program):
    function = autocast(loss(program), "mixed_bfloat16, rules=none")
    plain = jax.jit(jax.value_and_grad(loss(program), (0, 1, 2)))(X, W, B)
    ours = jax.jit(jax.value_and_grad(function, (0, 1, 2)))(X, W, B)
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@SIZES
@given(PROGRAMS)
def test_results_and_gradients_agree_with_float32(policy, program):
    function = loss(program)
    plain = jax.jit(jax.value_and_grad(function, (0, 1, 2)))(X, W, B)
    ours = jax.jit(jax.value_and_grad(autocast(function, policy), (0, 1, 2)))(X, W, B)
    epsilon = EPSILON[policy.removeprefix("mixed_")]
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert one.dtype == jnp.float32
        # 32 numbers are summed up, each after at most a dozen roundings of numbers around 1.
        limit = 16 * epsilon * max(1.0, float(jnp.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


@SIZES
@given(PROGRAMS)
def test_programs_run_in_the_dtypes_that_the_rules_say(program):
    closed = jax.make_jaxpr(autocast(program))(X, W, B)
    low, full = "bfloat16", "float32"
    for name in ("dot_general", "conv_general_dilated"):
        assert {each for each, _ in dtypes(closed, name)} <= {(low, low)}
    for name in ("exp", "log1p", "square", "reduce_sum", "integer_pow"):
        assert {each for each, _ in dtypes(closed, name)} <= {(full,)}
    for equation in equations(closed.jaxpr):
        if equation.primitive.name in ("scan", "while"):
            assert low not in {str(var.aval.dtype) for var in equation.outvars}
    assert [str(aval.dtype) for aval in closed.out_avals] == [full]
