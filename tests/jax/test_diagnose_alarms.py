"""A diagnosis tells of nothing that a program means, and never of nothing where there is a NaN."""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.jax import autocast, diagnose
from tests.jax.diagnosing import half, is_fine, scoped, single, where

MASK = jnp.array([True, True, False])


def masked(x):
    return (jax.nn.softmax(jnp.where(MASK, x, -jnp.inf)) * x).sum()


def twice(x):
    safe = jnp.where(x > 0, x, 1)
    return jnp.where(x > 0, jnp.sqrt(safe), 0).sum()


def with_number(x):
    return jax.nn.softmax(x + jnp.where(MASK, 0, -1e9).astype(x.dtype))[0]


def chosen(x):
    return jnp.where(x < 5, lax.stop_gradient(jnp.exp(x)), x).sum()


def dropout(x):
    return (x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)).sum()


FINE = {
    "mask": (masked, (1, 2, 3)),
    "mask of -1e9": (with_number, (1, 2, 3)),
    "where, twice": (twice, (4, 0)),
    "logsumexp": (jax.nn.logsumexp, (100, -100)),
    "softplus": (lambda x: jax.nn.softplus(x).sum(), (100, -100)),
    "sigmoid": (lambda x: jax.nn.sigmoid(x).sum(), (100, -100)),
    "xent": (lambda x: -jax.nn.log_softmax(x)[1], (100, -100)),
    "max": (lambda x: jnp.max(x, initial=-jnp.inf), (1, 2)),
    "branch": (lambda x: lax.cond(x[0] > 0, jnp.sum, lambda v: jnp.log(v * 0).sum(), x), (1, 2)),
    "unused": (lambda x: (jnp.log(x * 0), x.sum())[1], (1, 2)),
    "not chosen": (chosen, (1, 200)),
    "dropout": (dropout, (1, 2)),
    "sort": (lambda x: jnp.sort(x)[0] + jnp.median(x), (2, 1, 3)),
    "integers": (lambda x: x[jnp.array([0, 1])].sum(), (1, 2)),
}


@pytest.mark.parametrize("make", [half, single])
@pytest.mark.parametrize("name", FINE)
def test_what_is_fine_is_not_told(name, make):
    function, value = FINE[name]
    with jax.numpy_dtype_promotion("standard"):
        assert is_fine(function, make(*value))
        assert not diagnose(jax.jit(function), make(*value))


def test_a_row_that_is_masked_whole():
    def attend(x):
        return jax.nn.softmax(jnp.where(x > 5, x, -jnp.inf)).sum()

    fault = diagnose(scoped("attend", attend), single(1, 2)).first
    assert where(fault) == ("attend", "sub", "forward")
    assert fault.kind == "nan"


def test_what_a_program_returns_as_it_is_written_is_still_told():
    fault = diagnose(
        scoped("bound", lambda x: jnp.where(x > 5, x, -jnp.inf).sum()), single(1, 2)
    ).first
    assert (fault.module, fault.kind, fault.phase) == ("bound", "inf", "forward")


def test_faults_are_told_once_and_in_order():
    def loss(x):
        first = jnp.tanh(scoped("one", lambda v: v * jnp.float16(1000))(x))
        again = lax.fori_loop(0, 3, lambda i, v: jnp.tanh(v * jnp.float16(6e4) * 10), first)
        return scoped("two", lambda v: (v * jnp.float16(6e4) * 10).sum())(again)

    diagnosis = diagnose(loss, half(100))
    assert [fault.module for fault in diagnosis.faults] == ["one", "loss", "two"]


def net(params, x):
    hidden = scoped("in", lambda v: jax.nn.relu(v @ params["in"] + params["bias"]))(x)
    centred = hidden - hidden.mean(-1, keepdims=True)
    hidden = scoped("norm", lambda v: v / (v.std(-1, keepdims=True) + 1e-3))(centred)
    mask = jnp.tri(len(x), dtype=bool)
    weights = jax.nn.softmax(jnp.where(mask, hidden @ hidden.T, -jnp.inf))
    return jnp.mean((weights @ hidden @ params["out"]) ** 2)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e3, 1e5])
def test_it_agrees_with_what_jax_computes(policy, size):
    draw = np.random.default_rng(0)
    shapes = {"in": (8, 16), "bias": (16,), "out": (16, 1)}
    params = {name: jnp.float32(draw.normal(size=shape) * size) for name, shape in shapes.items()}
    function, inputs = autocast(net, policy), jnp.float32(draw.normal(size=(4, 8)) * 10)
    with jax.numpy_dtype_promotion("standard"):
        assert bool(diagnose(function, params, inputs)) != is_fine(function, params, inputs)
