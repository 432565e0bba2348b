"""What a diagnosis says to write makes the fault go away."""

import jax
import pytest
from jax import numpy as jnp

import halfstep.jax
from halfstep.jax import autocast, diagnose, loss_scale
from tests.jax.diagnosing import half, is_fine, scoped, single


def pasted(remedy, **names):
    """Returns what the last line of a remedy gives, or the first name that it assigns."""
    names |= {"jnp": jnp, "jax": jax, "halfstep": halfstep}
    *before, last = remedy.splitlines()
    exec("\n".join(before), names)
    return eval(last, names)


ROOTS = {
    "sqrt": (jnp.sqrt, (4, 0)),
    "log": (jnp.log, (4, 0)),
    "rsqrt": (jax.lax.rsqrt, (4, 0)),
    "cbrt": (jnp.cbrt, (8, 0)),
    "pow": (lambda x: x**0.5, (4, 0)),
    "div": (lambda x: 3 / x, (4, 0)),
    "exp": (jnp.exp, (1, 500)),
}


@pytest.mark.parametrize("name", ROOTS)
def test_selecting_before_and_after(name):
    function, value = ROOTS[name]
    value = single(*value)

    def loss(x, call):
        return jnp.where((x > 0) & (x < 80), call(x), 0).sum()

    remedy = diagnose(lambda x: loss(x, function), value).first.remedy

    def safe(x):
        return pasted(remedy, h=x, power=0.5, dividend=3)

    assert is_fine(lambda x: loss(x, safe), value)
    assert not diagnose(lambda x: loss(x, safe), value)
    assert jnp.allclose(loss(value, safe), loss(value, function))


def test_a_clip():
    remedy = diagnose(lambda x: jnp.arccos(x).sum(), single(1, 0)).first.remedy
    assert is_fine(lambda x: pasted(remedy, h=x).sum(), single(1, 0))


def test_a_scope_in_float32():
    def loss(x, cast):
        return scoped("soft", lambda v: jnp.exp(v) / jnp.exp(v).sum())(cast(x))[0]

    remedy = diagnose(lambda x: loss(x, lambda v: v), half(20, 1)).first.remedy
    assert remedy.endswith("# for each x that goes into soft")
    line = remedy.partition(" = ")[2]
    assert not diagnose(lambda x: loss(x, lambda v: pasted(line, x=v)), half(20, 1))


def made(scope):
    def loss(w, x, inside=lambda function: function):
        product = scoped(scope, inside(jnp.matmul))(x, w) if scope else x @ w
        return jnp.tanh(product).mean()

    return loss, jnp.full((64, 4), 1e3), jnp.full((2, 64), 1e2)


@pytest.mark.parametrize("compile", [lambda function: function, jax.jit])
def test_an_island_in_a_region(compile):
    loss, *values = made("ff")
    remedy = diagnose(compile(autocast(loss, "mixed_float16")), *values).first.remedy
    assert remedy.endswith("# in place of the f that runs in ff")

    def again(w, x):
        return loss(w, x, lambda function: pasted(remedy, f=function))

    assert not diagnose(compile(autocast(again, "mixed_float16")), *values)
    assert (
        diagnose(lambda *given: autocast(loss, "mixed_float16")(*given), *values).first.remedy
        == remedy
    )


def test_bfloat16_where_there_is_no_scope():
    loss, *values = made("")
    remedy = diagnose(autocast(loss, "mixed_float16"), *values).first.remedy
    assert remedy.startswith('policy="mixed_bfloat16"')
    assert not diagnose(autocast(loss, "mixed_bfloat16"), *values)
    remedy = diagnose(lambda x: x @ x, half(300, 300)).first.remedy
    assert pasted(remedy) is jnp.bfloat16
    assert not diagnose(lambda x: x @ x, half(300, 300).astype(jnp.bfloat16))


WIDE = jnp.full((64, 8), 1e3), jnp.full((8, 4), 0.01)


def summed(w, x, weights=(1.0, 1.0, 1.0, 1.0)):
    return jnp.sum(scoped("head", jnp.matmul)(x, w) * jnp.array(weights, jnp.float32))


@pytest.mark.parametrize("compile", [lambda function: function, jax.jit])
def test_a_lower_scale_where_it_alone_makes_a_sum_overflow(compile):
    x, w = WIDE
    fault = diagnose(compile(autocast(summed, "mixed_float16")), w, x, argnums=0).first
    assert (fault.module, fault.operation, fault.phase) == ("head", "dot_general", "backward")
    assert fault.remedy.startswith("halfstep.jax.autocast(f, policy, scale=64.0)  # in place of 10")
    mended = pasted(fault.remedy, f=summed, policy="mixed_float16")
    assert jnp.allclose(jax.grad(mended)(w, x), jax.grad(summed)(w, x), rtol=1e-2)
    assert not diagnose(mended, w, x, argnums=0)
    higher = autocast(summed, "mixed_float16", scale=2.0**14)
    assert "scale=64.0" in diagnose(higher, w, x, argnums=0).first.remedy


def test_a_lower_scale_is_not_told_where_it_loses_gradients():
    x, w = WIDE
    cast = autocast(lambda w, x: summed(w, x, (1.0, 4e-9, 4e-9, 4e-9)), "mixed_float16")
    remedy = diagnose(cast, w, x, argnums=0).first.remedy
    assert "scale=" not in remedy
    assert remedy.endswith("# in place of the f that runs in head")


def test_a_lower_loss_scale_where_the_loss_is_scaled():
    x, w = (each.astype(jnp.float16) for each in WIDE)

    def loss(w, x, state):
        return state.scale(jnp.mean((x @ w).astype(jnp.float32)))

    def fault(text):
        state = loss_scale(text.partition("=")[2].partition("  #")[0].strip('"'))
        return diagnose(loss, w, x, state, argnums=0).first

    remedy = fault('loss_scale="dynamic(init_scale=65536.0)"').remedy
    assert remedy == 'loss_scale="dynamic(init_scale=256.0)"  # in place of 65536.0'
    assert fault(remedy) is None


def test_nothing_is_told_that_does_not_help():
    assert diagnose(lambda x: jnp.log(x).sum(), single(0, 1)).first.remedy == ""
    loss = scoped("far", lambda x: (x.astype(jnp.float32) * 1e38 * 1e38).sum())
    assert diagnose(loss, half(1)).first.remedy == ""
