"""A diagnosis of models of the libraries that are used with JAX."""

import pytest
from jax import numpy as jnp

from halfstep.jax import autocast, diagnose
from tests.jax.diagnosing import half, where

INPUTS = jnp.full((2, 20), 1e3)


def test_flax_linen():
    import flax.linen as nn
    import jax

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            hidden = nn.tanh(nn.Dense(64, name="expand")(x))
            return nn.Dense(1, name="head")(hidden)

    model = Model()
    ones = jax.tree.map(jnp.ones_like, model.init(jax.random.key(0), INPUTS))
    apply = autocast(lambda params, x: model.apply(params, x).mean(), "mixed_float16")
    assert not diagnose(apply, ones, INPUTS)
    fault = diagnose(apply, ones, INPUTS * 10).first
    assert where(fault) == ("Model.expand", "dot_general", "forward")
    # The line is not the library's own.
    assert fault.source.startswith(__file__)


def test_flax_nnx():
    from flax import nnx

    layers = {"first": nnx.Linear(20, 64, rngs=nnx.Rngs(0)), "scale": jnp.float32(1)}

    def loss(layers, x):
        return layers["first"](x).mean() * layers["scale"]

    assert not diagnose(loss, layers, INPUTS)
    layers["first"].kernel[...] = layers["first"].kernel[...] * jnp.nan
    fault = diagnose(loss, layers, INPUTS).first
    assert fault.module.startswith("args[0]['first']['kernel']")
    layers = {"first": nnx.Linear(20, 64, rngs=nnx.Rngs(0)), "scale": jnp.float32(jnp.nan)}
    assert diagnose(loss, layers, x=INPUTS).first.module == "args[0]['scale']"
    layers["scale"] = jnp.float32(1)
    assert diagnose(loss, layers, x=INPUTS * jnp.inf).first.module == "kwargs['x']"


def test_equinox():
    import equinox as eqx
    import jax

    model = eqx.nn.MLP(20, 1, 64, 2, key=jax.random.key(0))
    assert not diagnose(autocast(model, "mixed_float16"), INPUTS[0])
    fault = diagnose(autocast(model, "mixed_float16"), INPUTS[0] * 1e3).first
    assert (fault.operation, fault.phase) == ("cast", "forward")
    assert fault.module.endswith("Linear")


def scattered(x):
    return jnp.zeros(2, x.dtype).at[jnp.array([0, 0])].add(x)[0]


OF_JAX = [
    (lambda x: jnp.cumsum(x)[-1], half(60000, 60000), "<lambda>", "cumsum"),
    (scattered, half(4e4, 4e4), "scattered", "scatter_add"),
]


@pytest.mark.parametrize(("function", "value", "module", "operation"), OF_JAX)
def test_functions_of_jax_are_told_with_the_line_that_calls_them(
    function, value, module, operation
):
    fault = diagnose(function, value).first
    assert where(fault) == (module, operation, "forward")
    assert fault.source.startswith(__file__)
    assert not fault.in_float32


def test_a_line_that_happens_to_divide_is_not_to_blame():
    fault = diagnose(lambda x: jnp.abs(jnp.linalg.eigh(x)[1]).sum(), jnp.eye(2)).first
    assert fault.phase == "backward"
    assert fault.remedy == ""
