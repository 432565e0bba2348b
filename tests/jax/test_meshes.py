"""Regions that hold a `shard_map` of their own."""

import jax
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import AxisType

from halfstep.jax import autocast
from tests.jax.test_region import F16, W, X, worst


def mapped(function, specs, out, **options):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out, **options)


def mean(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def mean_over_devices(**options):
    def local(w, x):
        return lax.pmean(mean(w, x), "d")

    return mapped(local, (jax.P(), jax.P("d")), jax.P(), **options)


def sum_over_devices(w, x):
    def local(w, x):
        return lax.psum(jnp.sum(jnp.tanh(x @ w)), "d")

    return mapped(local, (jax.P(), jax.P("d")), jax.P())(w, x)


def replicated_weight(w, x):
    rows = mapped(jnp.matmul, (jax.P("d"), jax.P()), jax.P("d"))
    return jnp.mean(rows(x, w) ** 2)


def tensor_parallel(w, x):
    def local(w, x):
        return lax.psum(x @ w, "d")

    return jnp.mean(mapped(local, (jax.P("d"), jax.P(None, "d")), jax.P())(w, x) ** 2)


def around_pmap(w, x):
    def local(w, x):
        return lax.pmean(mean(w, x), "d")

    return jax.pmap(local, "d", in_axes=(None, 0))(w, x.reshape(2, 8, 8))[0]


INSIDE = [
    mean_over_devices(),
    mean_over_devices(check_vma=False),
    sum_over_devices,
    replicated_weight,
    tensor_parallel,
    around_pmap,
]


@pytest.mark.parametrize("function", INSIDE)
def test_a_region_around_a_shard_map(function):
    def gradient(w, factor):
        return jax.grad(lambda w: factor * autocast(function, F16)(w, X))(w) / factor

    plain = jax.jit(jax.grad(function))(W, X)
    # Without jit, JAX compiles a program for each operation on the devices, each time anew.
    assert worst(gradient(W, 1e-9), plain) < 5e-3
    for factor in (1e-9, 1.0, 1e9):
        assert worst(jax.jit(gradient)(W, factor), plain) < 5e-3


def test_axes_of_a_mesh_around_are_still_shared():
    def local(w, x, weight):
        @autocast(policy=F16)
        def inside(w):
            return mean(lax.pcast(w, "d", to="varying"), x)

        return lax.psum(jnp.sum(weight) * inside(w), "d")

    run = mapped(local, (jax.P(), jax.P("d"), jax.P("d")), jax.P())
    gradient = jax.grad(autocast(run, F16))(W, X, jnp.array([1e-6, 1e6]))
    assert worst(gradient, 1e6 * jax.grad(mean)(W, X[8:])) < 5e-3
