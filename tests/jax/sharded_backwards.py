"""Run by test_sharded.py, in a process with four devices."""

from functools import partial

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.jax import autocast
from tests.jax.backwards import F16, LAYERS, OWN, W, X, backward, plain, worst

MESH = jax.make_mesh((4,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
SPECS = {"mesh": MESH, "in_specs": (jax.P(), jax.P("rows"))}


def by_norm_of_all(cotangent):
    square = lax.psum(jnp.sum(cotangent**2), "rows")
    return cotangent * jnp.minimum(1.0, 1e-3 * lax.rsqrt(square))


def looped(own, w, x):
    def layer(h, weights):
        one = lax.cond(h[0, 0] > 0, own, lambda h: h, jnp.tanh(h @ weights))
        return jax.checkpoint(own)(one), None

    return jnp.mean(jax.jit(lambda h: lax.scan(layer, h, LAYERS)[0])(x @ w) @ w)


def around(program, own, policy):
    """Returns a loss of which each device runs a part in a region of its own."""

    def part(w, x):
        w = lax.pcast(w, "rows", to="varying")
        weight = 10.0 ** -lax.axis_index("rows").astype(jnp.float32)
        return lax.pmean(weight * autocast(partial(program, own), policy)(w, x), "rows")

    return jax.shard_map(part, out_specs=jax.P(), **SPECS)


def around_rows(program, own, policy):
    """Returns a loss of which each device runs a batch of regions."""

    def part(w, x):
        w = lax.pcast(w, "rows", to="varying")
        of_rows = jax.vmap(autocast(partial(program, own), policy), (None, 0))
        return lax.pmean(jnp.mean(of_rows(w, x[:, None])), "rows")

    return jax.shard_map(part, out_specs=jax.P(), **SPECS)


def inside(program, own, policy, *, check_vma=True):
    """Returns a region inside of which each device runs a part."""

    def part(w, x):
        return program(own, w, x)[None]

    mapped = jax.shard_map(part, out_specs=jax.P("rows"), check_vma=check_vma, **SPECS)
    return autocast(lambda w, x: jnp.mean(mapped(w, own(jnp.tanh(x)))), policy)


BUILDS = [around, around_rows, inside, partial(inside, check_vma=False)]


def error(build, program, own):
    """Returns how far gradients in float16 are from those in float32."""
    functions = (build(program, own, policy) for policy in (F16, "float32"))
    ours, true = (jax.jit(jax.grad(each, (0, 1)))(W, X) for each in functions)
    return worst(ours, true)


def branching(own, w, x):
    h = jnp.tanh(x @ w)
    return 1e-3 * jnp.mean(lax.cond(x[0, 0] > 0, lambda h: own(h * h), jnp.tanh, h))


def turning(own, w, x):
    def turn(h, _):
        inner = partial(lax.cond, h[0, 1] > 0, lambda h: own(h) + h, jnp.sin)
        return lax.cond(x[0, 0] > 0, inner, jnp.tanh, h), None

    return 1e-3 * jnp.mean(lax.scan(turn, jnp.tanh(x @ w), None, 3)[0])


@pytest.mark.parametrize("build", BUILDS)
def test_a_device_scales_by_itself_what_its_branch_makes_of_tiny_cotangents(build):
    assert error(build, branching, backward(jnp.sign)) < 0.01


@pytest.mark.parametrize("sign", [jnp.sign, jnp.abs])
def test_so_it_does_in_branches_of_branches_in_a_loop(sign):
    assert error(around, turning, backward(sign)) < 0.01


def test_devices_agree_in_a_branch_that_all_of_them_take():
    def together(own, w, x):
        h, largest = jnp.tanh(x @ w), lax.pmax(lax.stop_gradient(x[0, 0]), "rows")
        return 1e-3 * jnp.mean(lax.cond(largest > 0, own, jnp.tanh, h))

    assert error(around, together, backward(by_norm_of_all)) < 0.01
    assert error(around, together, backward(jnp.sign)) < 0.01


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("program", [plain, looped])
@pytest.mark.parametrize("name", ["clip", "norm"])
def test_devices_are_handed_true_cotangents(build, program, name):
    assert jax.device_count() == 4
    assert error(build, program, OWN[name]) < 0.02


def test_a_norm_over_all_devices_is_that_of_true_cotangents():
    assert error(around, plain, backward(by_norm_of_all)) < 0.01
