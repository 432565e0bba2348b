"""Programs that hold other kinds of programs than the usual ones, and orders of transformations."""

import jax
import jax.export
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import linear_call
from jax.experimental.ode import odeint
from jax.scipy.sparse.linalg import cg

from halfstep.jax import autocast

KEYS = jax.random.split(jax.random.key(0), 2)
X, W = jax.random.normal(KEYS[0], (4, 8)), jax.random.normal(KEYS[1], (8, 8)) / 3
ONE = jnp.eye(8)


def rooted(x):
    def newton(function, start):
        return lax.fori_loop(0, 20, lambda _, y: y - function(y) / jax.grad(function)(y), start)

    target = jnp.sum(jnp.tanh(x @ W)) ** 2 + 1.0
    return lax.custom_root(lambda y: y**3 - target, 1.0, newton, lambda g, y: y / g(1.0))


def linear(x):
    return linear_call(lambda by, x: x * by, lambda by, ct: ct * by, 2.0, x @ W)


def named(x):
    kept = jax.checkpoint_policies.save_only_these_names("hidden")
    return jax.checkpoint(lambda x: checkpoint_name(jnp.tanh(x @ W), "hidden") @ W, policy=kept)(x)


def pushed(x):
    return jax.jvp(lambda x: jnp.tanh(x @ W), (x,), (x,))[1]


def curved(x):
    return jax.jvp(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ W) ** 2)), (x,), (x,))[1]


def placed(x):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    return lax.with_sharding_constraint(x @ W, jax.NamedSharding(mesh, jax.P("rows"))) @ W


PROGRAMS = {
    "linear solver": lambda x: cg(lambda v: (W.T @ W + ONE) @ v, x[0] @ W)[0],
    "root": rooted,
    "differential equation": lambda x: odeint(lambda y, t: jnp.tanh(y @ W), x, jnp.arange(2.0))[-1],
    "linear call": linear,
    "platform": lambda x: lax.platform_dependent(x @ W, cpu=jnp.sin, default=jnp.cos),
    "barrier": lambda x: lax.optimization_barrier(x @ W) * 2.0,
    "unrolled": lambda x: lax.scan(lambda at, _: (at @ W, None), x, None, length=4, unroll=2)[0],
    "names": named,
    "jvp": pushed,
    "hessian-vector": curved,
    "sharding": placed,
}


# One of them takes gradients inside of the region.
@pytest.mark.filterwarnings("ignore::halfstep.jax.UnscaledGradientsWarning")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_gradients_agree_with_float32(name, policy):
    def loss(x):
        out = PROGRAMS[name](x)
        return jnp.sum(out), out

    plain = jax.jit(jax.grad(loss, has_aux=True))(X)
    ours = jax.jit(jax.grad(autocast(loss, policy), has_aux=True))(X)
    for one, other in zip(ours, plain, strict=True):
        limit = 0.03 * float(jnp.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=0, atol=limit)


def test_a_batching_rule_is_kept():
    @jax.custom_batching.custom_vmap
    def function(x):
        return jnp.sin(x)

    # Not the batch of it, so that it shows who was asked.
    function.def_vmap(lambda size, batched, x: (jnp.cos(x), batched[0]))
    inside = autocast(lambda x: jax.vmap(function)(x @ W))(X)
    outside = jax.vmap(autocast(lambda row: function(row @ W)))(X)
    for out in (inside, outside):
        np.testing.assert_allclose(out, jnp.cos(X @ W), atol=0.03)


def test_arrays_whose_sharding_is_part_of_their_type():
    mesh = jax.make_mesh((2,), ("rows",))

    def loss(x):
        return jnp.mean((jnp.tanh(x @ W) @ W + jnp.ones(8)) ** 2)

    with jax.set_mesh(mesh):
        x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("rows", None)))
        gradient = jax.jit(jax.grad(autocast(loss, "mixed_float16")))(x)
    assert gradient.sharding.spec == jax.P("rows", None)
    np.testing.assert_allclose(gradient, jax.grad(loss)(X), atol=0.005)


def test_a_program_is_exported_and_its_shapes_are_told():
    function = autocast(lambda x: x @ W)
    assert jax.eval_shape(function, X) == jax.ShapeDtypeStruct((4, 8), jnp.float32)
    exported = jax.export.export(jax.jit(function))(X)
    np.testing.assert_array_equal(exported.call(X), jax.jit(function)(X))
