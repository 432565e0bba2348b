"""What a diagnosis says to write makes the fault go away."""

import jax
import pytest
from jax import numpy as jnp

import halfstep.jax
from halfstep.jax import autocast, diagnose
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


def test_nothing_is_told_that_does_not_help():
    assert diagnose(lambda x: jnp.log(x).sum(), single(0, 1)).first.remedy == ""
    loss = scoped("far", lambda x: (x.astype(jnp.float32) * 1e38 * 1e38).sum())
    assert diagnose(loss, half(1)).first.remedy == ""
