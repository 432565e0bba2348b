"""Gradients of batches of regions that hold a backward, which are batched, then transposed."""

from functools import partial

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax import autocast
from tests.jax.backwards import F16, OWN, PROGRAMS, W, X, backward, worst

# One of the programs takes a gradient inside of the region, to show that it is right there.
pytestmark = pytest.mark.filterwarnings("ignore::halfstep.jax.UnscaledGradientsWarning")

ROWS = X.reshape(4, 4, 8)
SEVERAL = jnp.stack([W, 2 * W, W / 3, -W])
WAY = jnp.cos(W)


@jax.custom_vjp
def dense(x, w):
    return jnp.tanh(x @ w)


def dense_forward(x, w):
    out = jnp.tanh(x @ w)
    return out, (x, w, out)


def dense_backward(kept, cotangent):
    x, w, out = kept
    inner = cotangent * (1 - out**2)
    return inner @ w.T, x.T @ inner


dense.defvjp(dense_forward, dense_backward)


def layers(w, x):
    return jnp.mean((dense(dense(x, w), w) @ w) ** 2)


def clipping(w, x):
    return jnp.mean(jnp.tanh(OWN["norm"](dense(x, w)) @ OWN["clip"](w)) ** 2)


def by_norm_of_all(cotangent):
    square = lax.psum(jnp.sum(cotangent**2), "rows")
    return cotangent * jnp.minimum(1.0, 1e-3 * lax.rsqrt(square))


def rows(function, w=W, x=ROWS, dims=(None, 0), **options):
    """Returns what a function gives for each row of a batch."""
    return jax.vmap(function, dims, **options)(w, x)


def mean(function, w=W, x=ROWS, **options):
    return jnp.mean(rows(function, w, x, **options))


def compiled(cast, loss):
    return jax.jit(jax.grad(partial(mean, jax.jit(cast(jax.jit(loss))))))(W)


def with_value(cast, loss):
    return jax.value_and_grad(partial(mean, cast(loss)))(W)


def with_more(cast, loss):
    def of_rows(w):
        losses, more = rows(cast(lambda w, x: (loss(w, x), dense(x, w), jnp.int32(1))), w)[:2]
        return jnp.mean(losses), more

    return jax.value_and_grad(of_rows, has_aux=True)(W)


def twice(cast, loss):
    def of_rows(w, x):
        return rows(cast(loss), w, x)

    return jax.grad(partial(mean, of_rows, x=jnp.stack([ROWS, -ROWS / 2])))(W)


def other_axes(cast, loss):
    given = jnp.moveaxis(SEVERAL, 0, 2), ROWS.swapaxes(0, 1)
    return jax.grad(partial(mean, cast(loss), dims=(2, 1)), (0, 1))(*given)


def shared_inputs(cast, loss):
    return jax.grad(partial(mean, cast(loss), dims=(0, None)), (0, 1))(SEVERAL, X)


def other_results(cast, loss):
    scaled = cast(lambda w, x: loss(w, x) * dense(x, w))
    return jax.grad(lambda w: jnp.mean(rows(scaled, w, out_axes=1) ** 2))(W)


def checkpoints(cast, loss):
    inside = jax.checkpoint(cast(jax.checkpoint(loss)))
    return jax.grad(jax.checkpoint(partial(mean, inside)))(W)


def loops_around(cast, loss):
    def turn(state, x):
        return state + mean(cast(loss), W * (1 + state), x), None

    return jax.grad(lambda x: lax.scan(turn, jnp.float32(0), x)[0])(ROWS[:, :, None])


def loops_inside(cast, loss):
    def looped(w, x):
        return lax.scan(lambda s, x: (s + loss(jnp.cos(s) * w, x[None]), None), 0.0, x)[0]

    return jax.grad(partial(mean, cast(looped)))(W)


def sums_of_rows(cast, loss):
    def summed(w, x):
        return lax.psum(loss(w, jnp.tanh(lax.pmean(dense(x, w), "rows"))), "rows")

    return jax.grad(lambda w: rows(cast(summed), w, axis_name="rows", out_axes=None))(W)


def norm_of_all(cast, loss):
    own = backward(by_norm_of_all)
    inside = cast(lambda w, x: loss(w, own(dense(x, w))))
    return jax.grad(partial(mean, inside, axis_name="rows"))(W)


def jacobian(cast, loss):
    return jax.jacrev(partial(rows, cast(loss)))(W)


def curved(cast, loss):
    once = jax.grad(partial(mean, cast(loss)))
    return jax.grad(lambda w: jnp.sum(once(w) * WAY))(W)


def curved_rows(cast, loss):
    each = jax.grad(cast(loss))
    return jax.grad(lambda w: jnp.sum(jnp.sin(rows(each, w))))(W)


def batch_of_gradients(cast, loss):
    return jax.vmap(jax.grad(partial(mean, cast(loss))))(SEVERAL)


def inside_of_a_region(cast, loss):
    return jax.grad(cast(partial(mean, cast(loss))))(W)


def partitioned(cast, loss):
    mesh = jax.make_mesh((2,), ("parts",))
    x = jax.device_put(ROWS, jax.NamedSharding(mesh, jax.P("parts")))
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(partial(mean, cast(loss))))(jax.device_put(W, jax.P()), x)


def named_for_devices(cast, loss):
    return jax.grad(partial(mean, cast(loss), spmd_axis_name="parts"))(W)


ASKED = [
    *(compiled, with_value, with_more, twice, other_axes, shared_inputs, other_results),
    *(checkpoints, loops_around, loops_inside, sums_of_rows, norm_of_all, jacobian, curved),
    *(curved_rows, batch_of_gradients, inside_of_a_region, partitioned, named_for_devices),
]


def error(ask, loss):
    """Returns how far what is asked of a region is from what is asked of plain JAX."""
    return worst(ask(partial(autocast, policy=F16), loss), ask(lambda function: function, loss))


@pytest.mark.parametrize("loss", [layers, clipping])
@pytest.mark.parametrize("ask", ASKED)
def test_it_agrees_with_plain_jax(ask, loss):
    assert error(ask, loss) < 0.01


@pytest.mark.parametrize("name", ["clip", "unit"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_gradient_of_any_program(program, name):
    def both(cast, loss):
        return jax.jit(jax.grad(partial(mean, cast(loss)), (0, 1)))(W, ROWS)

    assert error(both, partial(program, OWN[name])) < 0.02


def test_what_rows_share_is_handed_the_sum_of_their_cotangents():
    def gradient(cast, loss):
        return jax.grad(partial(mean, cast(lambda w, x: jnp.mean(x @ OWN["clip"](w)))))(W)

    assert error(gradient, layers) < 0.01
    ours = gradient(partial(autocast, policy=F16), layers)
    assert jnp.all(jnp.abs(ours) <= 1e-4)


def test_a_row_that_does_not_take_a_branch_leaves_no_nan():
    def rooted(w, x):
        return lax.cond(x[0, 0] > 0, lambda h: jnp.sum(jnp.sqrt(h)), jnp.sum, x[:1, :1] + 0 * w)

    x = jnp.array([4.0, 0.0, -1.0]).reshape(3, 1, 1)
    gradients = jax.grad(lambda w: mean(autocast(rooted, F16), w, x))(W[:1, :1])
    assert gradients == 0
    moved = jax.grad(lambda x: mean(autocast(rooted, F16), W[:1, :1], x))(x)
    assert jnp.allclose(moved[:, 0, 0], jnp.array([0.25, 1.0, 1.0]) / 3, rtol=1e-3)


def test_the_linear_program_of_what_rows_share_runs_once():
    @partial(autocast, policy=F16)
    def half(w):
        return jnp.mean(dense(w, w) @ w)

    jaxpr = str(jax.make_jaxpr(jax.grad(partial(mean, lambda w, x: half(w) * x[0, 0])))(W))
    assert "f16[4,8,8]" not in jaxpr
    assert "f16[8,8]" in jaxpr


@pytest.mark.parametrize("policy", [F16, "mixed_bfloat16"])
@pytest.mark.parametrize("build", [lambda f: f, jax.jit, lambda f: partial(rows, f)])
def test_forward_mode_has_no_rule(policy, build):
    function = build(autocast(layers, policy))
    x = ROWS if isinstance(function, partial) else X
    with pytest.raises(UsageError, match=r"got a custom_vjp, .*\. Write jax\.vjp or jax\.grad"):
        jax.jit(jax.jvp, static_argnums=0)(function, (W, x), (W, x))
