"""A backward that is not linear is handed true cotangents, wherever in a region it stands."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax import autocast, diagnose
from halfstep.jax._interpret import _custom
from halfstep.jax._interpret._true import run_true
from halfstep.jax._scaled import run_scaled
from tests.jax.backwards import (
    F16,
    OWN,
    PROGRAMS,
    W,
    X,
    backward,
    branching,
    layered,
    layered_checkpoints,
    nested,
    nested_layers,
    plain,
    residual,
    rows_inside,
    several,
    worst,
)

# One of the programs takes a gradient inside of the region, to show that it is right there.
pytestmark = pytest.mark.filterwarnings("ignore::halfstep.jax.UnscaledGradientsWarning")

ROWS = X[:, None]


def named(each):
    return getattr(each, "__name__", str(each))


def weighed(program, own, weight, policy):
    return autocast(lambda w, x: weight * program(own, w, x), policy)


def error(gradient):
    """Returns how far what a policy gives is from what float32 gives."""
    return worst(jax.jit(partial(gradient, F16))(), gradient("float32"))


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_gradients_are_those_of_float32(name, program):
    def gradient(policy):
        return [
            jax.grad(weighed(program, OWN[name], weight, policy), (0, 1))(W, X)
            for weight in (1e-6, 1.0)
        ]

    assert error(gradient) < 0.03


@pytest.mark.parametrize("program", [plain, layered_checkpoints], ids=named)
@pytest.mark.parametrize("weight", [1e-9, 1.0, 1e6])
def test_in_any_order_with_jit(program, weight):
    cast = weighed(program, OWN["norm"], weight, F16)
    true = jax.grad(weighed(program, OWN["norm"], weight, "float32"))(W, X)
    orders = jax.grad(cast), jax.jit(jax.grad(cast)), jax.grad(jax.jit(cast))
    for gradient in (*orders, jax.grad(jax.checkpoint(cast))):
        assert worst(gradient(W, X), true) < 0.01


@pytest.mark.parametrize("program", [rows_inside, several, residual], ids=named)
def test_what_a_sign_makes_of_tiny_cotangents_neither_overflows_nor_hides_others(program):
    own = backward(jnp.sign)
    for weight in (1e-12, 1.0, 1e6):
        ours, true = (
            jax.grad(weighed(program, own, weight, policy), (0, 1))(W, X)
            for policy in (F16, "float32")
        )
        # A cotangent near zero may have another sign in float16.
        for one, other in zip(ours, true, strict=True):
            assert jnp.mean(jnp.abs(one - other)) < 0.02 * jnp.mean(jnp.abs(other))


def of_rows(program, own, policy):
    weights = jnp.logspace(-8.0, 4.0, 16)
    cast = autocast(lambda w, x, weight: weight * program(own, w, x), policy)
    return list(jax.vmap(jax.grad(cast), (None, 0, 0))(W, ROWS, weights))


def second(program, own, policy):
    cast = autocast(partial(program, own), policy)
    return jax.grad(lambda w: jnp.sum(jax.grad(cast)(w, X) ** 2))(W)


def second_of_rows(program, own, policy):
    each = jax.vmap(jax.grad(autocast(partial(program, own), policy)), (None, 0))
    return jax.grad(lambda w: jnp.mean(jnp.sum(each(w, ROWS) ** 2, axis=(1, 2))))(W)


def in_a_loop(program, own, policy):
    def turn(before, row):
        return before + autocast(partial(program, own), policy)(w_of(row), row), None

    def w_of(row):
        return W * jnp.mean(row)

    return jax.grad(lambda x: lax.scan(turn, jnp.float32(0), x)[0])(ROWS)


@pytest.mark.parametrize("around", [of_rows, second, second_of_rows, in_a_loop], ids=named)
@pytest.mark.parametrize("program", [plain, branching, layered], ids=named)
@pytest.mark.parametrize("name", ["norm", "unit"])
def test_what_stands_around_the_region(around, program, name):
    assert error(lambda policy: around(program, OWN[name], policy)) < 0.02


def test_the_clip_of_each_row_of_a_batch_and_of_a_second_derivative():
    for around in (of_rows, second):
        assert error(lambda policy, around=around: around(plain, OWN["clip"], policy)) < 0.02


@pytest.mark.parametrize("inner", ["float32", F16])
@pytest.mark.parametrize("program", [nested, nested_layers], ids=named)
@pytest.mark.parametrize("name", ["clip", "norm"])
def test_a_region_inside_of_another_one(inner, program, name):
    for weight in (1e-6, 1.0):
        inside = partial(program, policy=inner)
        ours = jax.grad(weighed(inside, OWN[name], weight, F16), (0, 1))(W, X)
        true = jax.grad(lambda w, x, inside=inside, weight=weight: weight * inside(OWN[name], w, x))
        assert worst(ours[0], true(W, X)) < 0.02


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("build", [lambda gradient: gradient, jax.jit])
def test_what_the_backward_prints_is_true(build, ordered, capfd):
    def told(cotangent):
        jax.debug.print("norm {}", jnp.max(cotangent), ordered=ordered)
        return cotangent

    own = backward(told)
    build(jax.grad(autocast(lambda w: 1e-3 * jnp.sum(own(w @ W)), F16)))(W)
    jax.effects_barrier()
    printed = float(capfd.readouterr().out.removeprefix("norm "))
    assert printed == pytest.approx(1e-3, rel=1e-3)


def test_several_cotangents_of_which_one_is_of_integers():
    @jax.custom_vjp
    def split(x):
        return x, jnp.argmax(x).astype(jnp.int32) * 0 + 1, 2 * x

    def back(kept, cotangents):
        one, _, two = cotangents
        return (jnp.clip(one, -1e-3, 1e-3) + jnp.sign(two) * kept,)

    split.defvjp(lambda x: (split(x), x), back)

    def loss(w):
        one, number, two = split(jnp.tanh(X @ w))
        return jnp.mean(one**2) + jnp.sum(jnp.tanh(two + 4.0)) * number.astype(two.dtype)

    assert worst(jax.grad(autocast(loss, F16))(W), jax.grad(loss)(W)) < 0.01


def test_homogeneous_but_not_linear_it_is_differentiated_as_it_is():
    own = backward(jax.nn.relu)

    def gradient(policy):
        cast = autocast(lambda w: jnp.tanh(own(own(X @ w) @ W)), policy)
        return jax.grad(lambda ct: jnp.sum(jnp.sin(jax.vjp(cast, W)[1](ct)[0])))(X)

    assert error(gradient) < 0.01


def doubling(cotangent):
    return 2 * cotangent @ W


@pytest.mark.parametrize("program", PROGRAMS, ids=named)
def test_a_linear_backward_changes_nothing(program, monkeypatch):
    def traced():
        cast = autocast(partial(program, backward(doubling)), F16)
        return str(jax.make_jaxpr(jax.grad(cast, (0, 1)))(W, X))

    ours = traced()
    monkeypatch.setattr(_custom, "is_homogeneous", lambda closed, held: True)
    assert ours == traced()
    assert "halfstep_true" not in ours


def test_where_nothing_is_scaled_rules_hold_as_before():
    cast = autocast(partial(plain, OWN["norm"]), "mixed_bfloat16")
    assert "halfstep_true" not in str(jax.make_jaxpr(jax.grad(cast))(W, X))


def test_it_runs_as_it_is_written():
    seen = []

    def back(cotangent):
        out = jnp.clip(cotangent @ W, -1e-3, 1e-3)
        seen.append((cotangent.dtype, out.dtype))
        return out

    text = str(jax.make_jaxpr(jax.grad(autocast(partial(plain, backward(back)), F16)))(W, X))
    assert set(seen) == {(jnp.dtype("float32"), jnp.dtype("float32"))}
    inside = text[text.index("halfstep_true[") :]
    assert "f32[16,8] = dot_general" in inside[: inside.index("in (")]


def test_diagnose_goes_through_it():
    own = backward(lambda cotangent: cotangent / jnp.sqrt(jnp.sum(cotangent * 0.0)))
    fault = diagnose(autocast(lambda w: jnp.sum(jnp.tanh(own(X @ w))), F16), W).first
    assert (fault.operation, fault.phase) == ("div", "backward")


def test_a_loop_that_ends_by_a_condition_cannot_hold_one():
    def looped(x):
        def turn(state):
            return state[0] + 1, run_true(lambda each: [jnp.sign(each)], (), [state[1]])[0]

        low = x.astype(jnp.float16).astype(jnp.float32)
        return lax.while_loop(lambda state: state[0] < 2, turn, (0, low))[1]

    closed = jax.make_jaxpr(looped)(X)
    with pytest.raises(UsageError, match=r"scan, cond, .* got one inside of while"):
        run_scaled(closed.jaxpr, (), (X,), np.float32(1024.0))
