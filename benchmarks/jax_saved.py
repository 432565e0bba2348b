"""Bytes that JAX keeps for the backward of two GPT blocks, by policy, with and without checkpoint.

python benchmarks/jax_saved.py
"""

import contextlib
import io
import re

import jax
import jax.ad_checkpoint
import numpy as np
from jax import lax
from jax import numpy as jnp

from halfstep.jax import autocast

WIDTH, HEADS, BATCH, LENGTH, TOKENS = 256, 4, 8, 128, 256
SHAPES = {
    "embedding": (TOKENS, WIDTH),
    "qkv": (WIDTH, 3 * WIDTH),
    "mixed": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}
BIASES = {"qkv_bias": 3 * WIDTH, "up_bias": 4 * WIDTH, "down_bias": WIDTH}


def parameters():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    weights = {
        name: jax.random.normal(key, shape) * shape[0] ** -0.5
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }
    biases = {name: jnp.zeros(size) for name, size in BIASES.items()}
    return weights | biases | {"first_norm": jnp.ones(WIDTH), "second_norm": jnp.ones(WIDTH)}


def norm(x, gain):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * gain


def attention(params, x):
    joined = norm(x, params["first_norm"]) @ params["qkv"] + params["qkv_bias"]
    q, k, v = jnp.moveaxis(joined.reshape(BATCH, LENGTH, 3, HEADS, -1), 2, 0)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(WIDTH // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return out.reshape(BATCH, LENGTH, WIDTH) @ params["mixed"]


def loss(params, tokens):
    x = params["embedding"][tokens]
    for _ in range(2):
        x = x + attention(params, x)
        inner = norm(x, params["second_norm"]) @ params["up"] + params["up_bias"]
        x = x + jax.nn.gelu(inner) @ params["down"] + params["down_bias"]
    rows = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.take_along_axis(rows, tokens[..., None], -1).mean()


BITS = {"f32": 32, "bf16": 16, "f16": 16, "bool": 8, "i32": 32}
LINE = re.compile(r"^(\w+)\[([\d,]*)\]", re.MULTILINE)


def saved(function, *arguments):
    """Returns how many bytes are kept, by dtype."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        jax.ad_checkpoint.print_saved_residuals(function, *arguments)
    found = {}
    for dtype, shape in LINE.findall(printed.getvalue()):
        size = np.prod([int(each) for each in shape.split(",") if each], dtype=int)
        found[dtype] = found.get(dtype, 0) + int(size) * BITS[dtype] // 8
    return found


def main():
    tokens = jax.random.randint(jax.random.key(1), (BATCH, LENGTH), 0, TOKENS)
    for kept in ("everything", "products"):
        for policy in ("float32", "mixed_bfloat16"):
            function = autocast(loss, policy)
            if kept == "products":
                dots = jax.checkpoint_policies.dots_saveable
                function = jax.checkpoint(function, policy=dots)
            sizes = saved(function, parameters(), tokens)
            by_dtype = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in sizes.items())
            print(f"{kept:10}  {policy:14}  {sum(sizes.values()) / 2**20:6.1f} MiB  ({by_dtype})")


if __name__ == "__main__":
    main()
