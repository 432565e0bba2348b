"""Functions of JAX that are made of many operations, on low values, with their gradients."""

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax import scipy as jsp

from halfstep.jax import autocast

X = jax.random.uniform(jax.random.key(0), (8, 8), minval=0.2, maxval=0.9)
IDS = jnp.array([1, 3, 1, 0])
ONE = jnp.eye(8)
KEY = jax.random.key(1)

FUNCTIONS = {
    "relu6": jax.nn.relu6,
    "elu": jax.nn.elu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "celu": jax.nn.celu,
    "mish": jax.nn.mish,
    "glu": jax.nn.glu,
    "hard_tanh": jax.nn.hard_tanh,
    "log_sigmoid": jax.nn.log_sigmoid,
    "logsumexp": lambda x: jax.nn.logsumexp(x, axis=1),
    "softmax_where": lambda x: jax.nn.softmax(x, where=jnp.arange(8) < 6),
    "standardize": jax.nn.standardize,
    "dot_product_attention": lambda x: jax.nn.dot_product_attention(*[x.reshape(2, 4, 2, 4)] * 3),
    "einsum": lambda x: jnp.einsum("ij,kj,kl->il", x, x, x),
    "tensordot": lambda x: jnp.tensordot(x, x, 1),
    "var": lambda x: jnp.var(x, axis=0),
    "std": lambda x: jnp.std(x, axis=0),
    "norm": lambda x: jnp.linalg.norm(x, axis=1),
    "median": lambda x: jnp.median(x, axis=1),
    "cumsum": lambda x: jnp.cumsum(x, axis=1),
    "cumprod": lambda x: jnp.cumprod(x, axis=1),
    "sort": lambda x: jnp.sort(x, axis=1),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "take": lambda x: x[IDS],
    "take_along_axis": lambda x: jnp.take_along_axis(x, IDS[:, None], axis=0),
    "at_add": lambda x: x.at[IDS].add(1.0),
    "at_max": lambda x: x.at[0].max(0.5),
    "at_multiply": lambda x: x.at[0].multiply(2.0),
    "segment_sum": lambda x: jax.ops.segment_sum(x[:4], IDS, num_segments=4),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (2, 8)),
    "pad": lambda x: jnp.pad(x, 1, constant_values=0.5),
    "roll": lambda x: jnp.roll(x, 3, axis=1),
    "clip": lambda x: jnp.clip(x, 0.1, 0.8),
    "power": lambda x: x**1.5,
    "arctan2": lambda x: jnp.arctan2(x, x.T + 1.0),
    "hypot": lambda x: jnp.hypot(x, x.T),
    "logaddexp": lambda x: jnp.logaddexp(x, x.T),
    "interp": lambda x: jnp.interp(x, jnp.linspace(0.0, 1.0, 5), jnp.linspace(0.0, 1.0, 5) ** 2),
    "where": lambda x: jnp.where(x > 2.0, x, x.T),
    "outer": lambda x: jnp.outer(x[0], x[1]),
    "solve": lambda x: jnp.linalg.solve(x + 4 * ONE, x),
    "inv": lambda x: jnp.linalg.inv(x + 4 * ONE),
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + 4 * ONE),
    "eigh": lambda x: jnp.linalg.eigh(x + x.T + jnp.diag(jnp.arange(8.0)))[0],
    "logdet": lambda x: jnp.linalg.slogdet(x + 4 * ONE)[1],
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "erf": jsp.special.erf,
    "gammaln": lambda x: jsp.special.gammaln(x + 1.0),
    "conv": lambda x: lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"),
    "conv_transpose": lambda x: lax.conv_transpose(
        x[None], jnp.ones((3, 8, 2)) * x[0, 0], (2,), "SAME"
    ),
    "avg_pool": lambda x: lax.reduce_window(x, 0.0, lax.add, (2, 2), (2, 2), "VALID") / 4,
    "max_pool": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
    "reduce": lambda x: lax.reduce(x, 0.0, lambda a, b: a + b, (0,)),
    "resize": lambda x: jax.image.resize(x, (16, 16), "bilinear"),
    "associative_scan": lambda x: lax.associative_scan(jnp.add, x),
    "map": lambda x: lax.map(jnp.tanh, x),
    "convolve": lambda x: jnp.convolve(x[0], x[1]),
    "quantile": lambda x: jnp.quantile(x, 0.3, axis=0),
    "dropout": lambda x: jnp.where(
        jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x / 0.5, 0.0
    ),
    "nested_vmap": lambda x: jax.vmap(jax.vmap(jnp.tanh))(x),
    "vmapped_take": lambda x: jax.vmap(lambda row, at: row[at], (0, 0))(x[:4], IDS),
    "expm": lambda x: jsp.linalg.expm(x / 8),
    "ragged": lambda x: lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([3, 5])),
}


POLICIES = ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients_agree_with_float32(name, policy):
    def function(x):
        # What comes in is low by then.
        return FUNCTIONS[name](x @ ONE)

    def loss(x):
        out = function(x)
        return jnp.sum(jnp.sin(out)), out

    low = jnp.asarray(X, "bfloat16").astype(jnp.float32)
    plain = jax.jit(jax.grad(loss, has_aux=True))(low)
    ours = jax.jit(jax.grad(autocast(loss, policy), has_aux=True))(low)
    for one, other in zip(ours, plain, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        limit = 0.04 * max(1.0, float(jnp.abs(other).max()))
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)
