"""Faulty programs as texts: what is told of each is pasted in, and mends it."""

import linecache

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

import halfstep.jax
from halfstep.jax import autocast, diagnose
from tests.jax.diagnosing import scoped

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
HALF = jnp.float16
ROWS = jnp.ones((4, 3))
NAMES = {
    **{"jax": jax, "jnp": jnp, "np": np, "lax": lax, "HALF": HALF, "halfstep": halfstep},
    "LARGE_ID": jnp.array([70000, 1, 2]),
}
FACTOR, CAST, MASK, EPSILON = "a factor", "a cast", "a mask", "an epsilon"
# The program, in which <> stands where the remedy is pasted; what was written there; its kind.
PROGRAMS = {
    "default": ("(lambda x, by=<>: x * by)(x).mean(dtype=jnp.float32)", "1e6", FACTOR),
    "branch": ("lax.cond(x.sum() > 0, lambda v: v * <>, lambda v: v * <>, x).sum()", "1e5", FACTOR),
    "vmap": ("jax.vmap(lambda row: (row * <>).sum())(x).sum()", "1e5", FACTOR),
    "remat": ("jax.checkpoint(lambda v: (v * <>).sum())(x)", "1e5", FACTOR),
    "jitted": ("jax.jit(lambda v: v * <>)(x).sum()", "1e5", FACTOR),
    "map": ("lax.map(lambda row: row * <>, x).sum()", "HALF(1e5)", FACTOR),
    "divided": ("(<> / x).sum()", "1e5", FACTOR),
    "einsum": ("jnp.einsum('ij,kj->ik', x, x * <>).sum()", "1e5", FACTOR),
    "in float16": ("(y * 2).astype(<>).sum()", "HALF", CAST),
    "as an array": ("(jnp.asarray(y * 2, dtype=<>) + 1).sum()", "HALF", CAST),
    "with integers": ("(jnp.ones(3) * LARGE_ID.astype(<>)).sum()", "HALF", CAST),
    "scores": ("jax.nn.softmax(jnp.where(x > 5, x, <>))[0, 0]", "-1e9", MASK),
    "added": ("jax.nn.softmax(x + (x - 1) * <>)[0, 0]", "-1e9", MASK),
    "lower": (
        "jax.nn.softmax(jnp.tril(x @ x.T) + jnp.triu(0 * x @ x.T) * <>)[0, 0]",
        "-3e38",
        MASK,
    ),
    "bounded": ("jax.nn.logsumexp(x + 0 * <>)", "jnp.asarray(-1e9, HALF)", MASK),
    "shares": ("((x - 1) / ((x - 1).sum() + <>)).sum()", "1e-9", EPSILON),
    "entropy": ("-jnp.log(jnp.abs(x - 1) + <>)[0, 0]", "1e-10", EPSILON),
    "length": ("((x - 1) / (jnp.abs(x - 1).max() + <>)).sum()", "HALF(1e-9)", EPSILON),
    "rms": ("((x - 1) * lax.rsqrt(jnp.square(x - 1).mean() + <>)).sum()", "1e-12", EPSILON),
}
_BEGINS = {
    FACTOR: "jnp.float32(",
    CAST: "jnp.float32",
    MASK: "jnp.finfo(jnp.float16).min / 2",
    EPSILON: "0.0001",
}


@pytest.fixture(autouse=True)
def promoting():
    with jax.numpy_dtype_promotion("standard"):
        yield


def made(text, number):
    """Returns a program with something written into it."""
    source = f"lambda x, y: {text.replace('<>', number)}"
    file = f"<{source}>"
    linecache.cache[file] = len(source), None, [source], file
    return scoped("part", eval(compile(source, file, "eval"), dict(NAMES)))


def pasted(remedy):
    """Returns what a remedy says to write: without its reason, and without a name for it."""
    return remedy.partition("  #")[0].removeprefix("epsilon = ")


@pytest.mark.parametrize("compiled", [lambda function: function, jax.jit])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_told_mends_the_program(name, compiled):
    text, number, kind = PROGRAMS[name]
    given = ROWS.astype(HALF), jnp.full(3, 5e4)
    fault = diagnose(compiled(made(text, number)), *given, argnums=()).first
    assert (fault.module, fault.phase, fault.in_float32) == ("part", "forward", False)
    assert (fault.operation == "cast") == (kind != EPSILON)
    assert pasted(fault.remedy).startswith(_BEGINS[kind])
    assert not diagnose(compiled(made(text, pasted(fault.remedy))), *given, argnums=())


IN_REGIONS = [
    name
    for name, (text, number, kind) in PROGRAMS.items()
    if kind in (MASK, EPSILON) and "HALF" not in text + number
]


@pytest.mark.parametrize("name", IN_REGIONS)
def test_a_region_has_no_such_fault(name):
    text, number, _ = PROGRAMS[name]
    given = ROWS, jnp.full(3, 5e4)
    assert not diagnose(autocast(made(text, number), "mixed_float16"), *given, argnums=())
