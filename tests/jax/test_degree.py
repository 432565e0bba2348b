"""What is known of a backward before it runs, against what it computes."""

from functools import partial

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import pallas_call

from halfstep.jax import autocast
from halfstep.jax._interpret._degree import is_homogeneous

KEPT = jnp.array([[0.5, -2.0, 3.0], [1.0, 0.25, -4.0], [2.0, 1.0, -1.0]])
CT = jnp.array([[0.75, -0.5, 1.5], [0.125, -3.0, 2.0], [1.0, -0.25, 0.5]])


def norm(ct):
    return jnp.linalg.norm(ct)


def counted(kept, ct):
    """Adds up until a count is reached."""
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + ct), (0, 0 * ct))[1]


def until_large(kept, ct):
    return lax.while_loop(lambda each: jnp.max(each) < 1e3, lambda each: 2 * each + 1e-3, ct)


def scanned(step, kept, ct):
    return lax.scan(lambda sum_, row: (step(sum_ + row), row), jnp.zeros(3), ct)[0]


def tripled(given, out):
    out[...] = 3 * given[...]


def partitioned(function):
    found = custom_partitioning(function)
    found.def_partition(partition=None, sharding_rule="i j -> i j")
    return found


HOMOGENEOUS = {
    "in_16_bits": lambda kept, ct: ct.astype(jnp.bfloat16).astype(ct.dtype),
    "with_8_bits_of_exponent": lambda kept, ct: lax.reduce_precision(ct, 8, 7),
    "itself": lambda kept, ct: ct,
    "nothing": lambda kept, ct: jnp.zeros_like(ct),
    "product": lambda kept, ct: kept @ ct + jnp.sum(kept * ct),
    "ratio": lambda kept, ct: ct**3 / (ct * ct),
    "mean_of_squares": lambda kept, ct: jnp.sqrt(jnp.mean(ct**2)),
    "largest": lambda kept, ct: jnp.max(ct, axis=0) + jax.nn.relu(ct),
    "by_sign": lambda kept, ct: jnp.where(ct > 0, ct, 0.5 * ct) * jnp.sign(ct),
    "masked": lambda kept, ct: jnp.where(kept > 0, ct, 0.0),
    "bounded": lambda kept, ct: jnp.maximum(ct, -jnp.inf),
    "rounded_to_the_largest": lambda kept, ct: jnp.round(ct / jnp.max(ct) * 127) * jnp.max(ct),
    "sorted": lambda kept, ct: jnp.sort(ct, axis=1)[:, ::-1] + lax.top_k(ct, 3)[0],
    "scattered": lambda kept, ct: jnp.zeros((5, 3)).at[jnp.array([3, 1, 3])].add(ct),
    "counted": counted,
    "scanned": partial(scanned, lambda sum_: sum_ * 0.5),
    "branching": lambda kept, ct: lax.cond(kept[0, 0] > 0, jnp.negative, lambda ct: 2 * ct, ct),
    "called": lambda kept, ct: jax.checkpoint(jax.jit(lambda ct: kept * ct))(ct),
    "cast": lambda kept, ct: ct.astype(jnp.float16).astype(jnp.float32),
    "third_root": lambda kept, ct: jnp.cbrt(ct) ** 3,
    "derived": lambda kept, ct: jax.vjp(jax.nn.softmax, kept)[1](ct)[0],
    "region": lambda kept, ct: jax.vjp(autocast(jnp.tanh, "mixed_float16"), kept)[1](ct)[0],
    "told_of_others": lambda kept, ct: (jax.debug.print("{}", kept), ct)[1],
    "partitioned": lambda kept, ct: partitioned(lambda ct: 2 * ct)(ct),
    "pallas": lambda kept, ct: pallas_call(tripled, out_shape=ct, interpret=True)(ct),
    "kernel": lambda kept, ct: jax.pure_callback(lambda k, c: k * c, ct, kept, ct),
}
OTHERS = {
    "in_8_bits": lambda kept, ct: ct.astype(jnp.float8_e5m2).astype(ct.dtype),
    "with_4_bits_of_exponent": lambda kept, ct: lax.reduce_precision(ct, 4, 3),
    "clip": lambda kept, ct: jnp.clip(ct, -1e-3, 1e-3),
    "by_norm": lambda kept, ct: ct * jnp.minimum(1.0, 1e-3 / norm(ct)),
    "unit": lambda kept, ct: ct / norm(ct),
    "almost_unit": lambda kept, ct: ct / (norm(ct) + 1e-6),
    "sign": lambda kept, ct: jnp.sign(ct),
    "square": lambda kept, ct: ct * ct,
    "root": lambda kept, ct: jnp.sqrt(jnp.abs(ct)),
    "constant": lambda kept, ct: jnp.ones_like(ct),
    "noise": lambda kept, ct: ct + 0.1 * kept,
    "cut": lambda kept, ct: jnp.where(jnp.abs(ct) > 0.1, ct, 0.0),
    "integers": lambda kept, ct: ct.astype(jnp.int32).astype(jnp.float32),
    "true": lambda kept, ct: ct + lax.convert_element_type(True, jnp.float32),
    "until_large": until_large,
    "scanned": partial(scanned, jnp.tanh),
    "branching": lambda kept, ct: lax.cond(ct[0, 0] > 0.1, jnp.negative, lambda ct: ct, ct),
    "partitioned": lambda kept, ct: partitioned(jnp.sign)(ct),
    "told": lambda kept, ct: (jax.debug.print("{}", ct), ct)[1],
    "told_inside": lambda kept, ct: jax.jit(lambda ct: (jax.debug.print("{}", ct), ct)[1])(ct),
}


def answer(function):
    return is_homogeneous(jax.make_jaxpr(function)(KEPT, CT), 1)


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_what_gives_the_factor_back(name):
    assert answer(HOMOGENEOUS[name])
    one, four = (HOMOGENEOUS[name](KEPT, factor * CT) for factor in (1.0, 4.0))
    np.testing.assert_allclose(four, 4.0 * one, rtol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_what_does_not(name):
    assert not answer(OTHERS[name])


ONE = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "sign": jnp.sign,
    "square": jnp.square,
    "root": lambda x: jnp.sqrt(jnp.abs(x)),
    "rsqrt": lambda x: lax.rsqrt(jnp.abs(x) + 0),
    "cube": lambda x: lax.integer_pow(x, 3),
    "inverse": lambda x: 1 / x,
    "tanh": jnp.tanh,
    "exp": jnp.exp,
    "floor": jnp.floor,
    "half": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
    "zero": jnp.zeros_like,
    "one": jnp.ones_like,
    "sum": lambda x: jnp.broadcast_to(jnp.sum(x, axis=0), x.shape),
    "largest": lambda x: jnp.broadcast_to(jnp.max(x), x.shape),
    "running": lambda x: lax.cummax(x, axis=0),
    "sort": lambda x: jnp.sort(x, axis=1),
    "where_largest": lambda x: jnp.ones_like(x) * jnp.argmax(x, axis=0).astype(x.dtype),
    "finite": lambda x: jnp.isfinite(x).astype(x.dtype),
    "transposed": jnp.transpose,
    "placed": lambda x: x.at[0].set(0.0),
    "turned": lambda x: lax.fori_loop(0, 2, lambda _, each: each + x, x),
    "scanned": lambda x: lax.scan(lambda sum_, row: (sum_ + row, sum_), 0 * x[0], x)[1],
    "called": lambda x: jax.jit(lambda x: jnp.clip(x, 0, jnp.inf))(x),
}
TWO = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "matmul": jnp.matmul,
    "less": lambda x, y: (x < y).astype(x.dtype),
    "where": lambda x, y: jnp.where(x > 0, x, y),
    "where_less": lambda x, y: jnp.where(x < y, y, x),
    "angle": jnp.arctan2,
    "rem": lax.rem,
    "cond": lambda x, y: lax.cond(x[0, 0] < y[0, 0], lambda: x, lambda: y),
    "rows": lambda x, y: jnp.concatenate([x[:1], y[1:]]),
}
STEPS = st.lists(
    st.tuples(st.sampled_from([*ONE, *TWO]), st.integers(0, 20), st.integers(0, 20)), max_size=6
)


def program(steps, kept, ct):
    """Runs steps, each on what earlier ones gave, and returns the last result."""
    made = [ct, kept, jnp.full_like(ct, 0.5)]
    for name, first, second in steps:
        one, other = made[-1 - first % len(made)], made[-1 - second % len(made)]
        made.append(ONE[name](one) if name in ONE else TWO[name](one, other))
    return made[-1] if steps else ct


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(STEPS)
def test_the_answer_yes_is_never_wrong(steps):
    function = partial(program, steps)
    # In 64 bits, nothing that six steps make of these numbers leaves the range.
    with jax.enable_x64(True):
        kept, ct = (jnp.asarray(each, jnp.float64) for each in (KEPT, CT))
        if not is_homogeneous(jax.make_jaxpr(function)(kept, ct), 1):
            return
        one, four = (np.asarray(jax.jit(function)(kept, factor * ct)) for factor in (1.0, 4.0))
    np.testing.assert_allclose(four / 4.0, one, rtol=1e-9, atol=1e-12)
