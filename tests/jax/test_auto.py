"""`auto` in JAX: found out when a function is first called, also where it is being traced."""

import jax
import pytest
from jax import numpy as jnp

from halfstep.core import Chosen, FamilyTimes, override_policy
from halfstep.errors import PolicyError, ScaleError
from halfstep.jax import _auto as auto
from halfstep.jax import autocast, explain
from halfstep.jax._racing import calls

WEIGHTS, INPUTS = jnp.ones((4, 2)), jnp.ones((3, 4))


class Device:
    """What a device takes for operations, and how often it was asked."""

    def __init__(self):
        self.count = 0
        self.is_fast_in(matmul=(0.5, 30.0), convolution=(2.0, 90.0))

    def is_fast_in(self, **ratios):
        self.times = tuple(FamilyTimes(name, "large", 1.0, *r) for name, r in ratios.items())

    def __call__(self, device):
        self.count += 1
        return self.times


@pytest.fixture
def device(monkeypatch, tmp_path):
    found = Device()
    monkeypatch.setattr(auto, "_measured", found)
    monkeypatch.setattr(auto, "CHOSEN", Chosen(lambda: tmp_path))
    return found


def product(weights, inputs):
    return jnp.mean(inputs @ weights)


def dtypes(function):
    text = str(jax.make_jaxpr(function)(WEIGHTS, INPUTS))
    return {name for name in ("bf16", "f16") if f":{name}[3,2] = dot_general" in text}


def test_it_is_found_out_when_the_function_is_called(device):
    function = autocast(product, "auto")
    assert device.count == 0
    assert dtypes(function) == {"bf16"}
    assert device.count == 1


@pytest.mark.parametrize("around", [jax.jit, jax.grad, lambda f: jax.vmap(f, (None, 0))])
def test_it_composes(device, around):
    function = around(autocast(policy="auto")(product))
    assert jnp.isfinite(jax.tree.leaves(function(WEIGHTS, INPUTS))[0]).all()
    assert device.count == 1


def test_what_is_slow_stays_in_float32(device):
    image, kernel = jnp.ones((1, 4, 8, 8)), jnp.ones((4, 4, 3, 3))

    def both(image, kernel):
        return jax.lax.conv(image, kernel, (1, 1), "SAME").reshape(4, 64) @ jnp.ones((64, 2))

    rows = {row.operation: row for row in explain(both, image, kernel, policy="auto").rows}
    convolution = rows["lax::conv_general_dilated"]
    assert (convolution.runs_in, convolution.action) == ("float32", "full")
    assert "2.00 times as long in bfloat16" in convolution.reason
    assert rows["lax::dot_general"].runs_in == "bfloat16"


def test_where_nothing_is_gained_nothing_changes(device):
    device.is_fast_in(matmul=(2.0, 2.0))
    plain, ours = (jax.make_jaxpr(f)(WEIGHTS, INPUTS) for f in (product, autocast(product, "auto")))
    assert str(plain) == str(ours)


def test_it_wins_and_is_won_over(device):
    with override_policy("auto"):
        assert dtypes(autocast(product, "mixed_float16")) == {"bf16"}
        assert dtypes(autocast(product, "float32")) == set()
    with override_policy("mixed_float16"):
        assert dtypes(autocast(product, "auto")) == {"f16"}


def test_what_is_wrong_is_told_at_once(device):
    with pytest.raises(ScaleError, match="needs scale to be a number above 0"):
        autocast(product, "auto", scale=-1.0)
    with pytest.raises(PolicyError, match="and alone"):
        autocast(product, "auto, scale=none")


def test_measuring_while_something_is_traced():
    """The operations run although the caller is traced."""
    seen = []

    def function(inputs):
        seen.append(auto._measured(jax.devices()[0]))
        return inputs

    jax.jit(function)(INPUTS)
    assert [(each.family, each.size) for each in seen[0]] == [
        ("matmul", "large"),
        ("convolution", "large"),
    ]


@pytest.mark.parametrize("entry", calls(jax.devices()[0]), ids="-".join)
def test_every_operation_runs_in_every_format(entry):
    inputs, weights = calls(jax.devices()[0])[entry]()
    assert (str(inputs.dtype), str(weights.dtype)) == (entry.dtype, "float32")
