import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax import autocast, diagnose
from tests.jax.diagnosing import half, scoped, single, where

HALF = jnp.float16


def large(x):
    return x * HALF(1000)


@jax.custom_vjp
def big(x):
    return scoped("rule", large)(x)


big.defvjp(lambda x: (big(x), None), lambda kept, grad: (grad,))


@jax.custom_jvp
def bigger(x):
    return scoped("rule", large)(x)


bigger.defjvp(lambda primals, tangents: (bigger(*primals), tangents[0]))


def looped(step):
    return lambda x: lax.scan(lambda c, y: (scoped("turn", step)(c, y), c), HALF(0), x)[0]


def chosen(x):
    return lax.cond(x[0] > 0, scoped("taken", large), jnp.sin, x).sum()


def by_hand(x):
    powers = jnp.exp(x)
    return (powers / powers.sum())[0]


def hidden(x):
    return jnp.tanh(scoped("hidden", large)(x)).sum()


def again(x):
    return scoped("again", large)(x).sum()


def rows(x):
    return jax.vmap(scoped("row", jnp.dot))(x, x).sum()


def doubled(x):
    return lax.fori_loop(0, 20, lambda turn, value: value * 2, x)


FORWARD = [
    (scoped("grow", lambda x: jnp.exp(x).sum()), half(20, 1), "grow", "exp"),
    (scoped("soft", by_hand), half(20, 1), "soft", "exp"),
    (scoped("dot", lambda x: x @ x), half(300, 300), "dot", "dot_general"),
    (scoped("sum", lambda x: x.sum()), half(60000, 60000), "sum", "cast"),
    (scoped("cast", lambda x: x.astype(HALF)[0]), single(1e6), "cast", "cast"),
    (scoped("gone", lambda x: jnp.log(x).sum()), half(0, 1), "gone", "log"),
    (scoped("norm", lambda x: (x / x.sum())[0]), half(0, 0), "norm", "div"),
    (lambda x: x[0] * x[1], half(3000, 3000), "<lambda>", "mul"),
    (looped(lambda c, y: c + y), jnp.full(10, 9e3, HALF), "turn", "add"),
    (scoped("fori", doubled), HALF(1), "fori", "mul"),
    (chosen, half(100, 1), "taken", "mul"),
    (rows, jnp.full((2, 4), 3e2, HALF), "row", "dot_general"),
    (jax.checkpoint(again), half(100), "again", "mul"),
    (lambda x: big(x).sum(), half(100), "rule", "mul"),
    (lambda x: bigger(x).sum(), half(100), "rule", "mul"),
    (hidden, half(100), "hidden", "mul"),
]


@pytest.mark.parametrize(("function", "value", "module", "operation"), FORWARD)
def test_what_is_made_forward(function, value, module, operation):
    fault = diagnose(function, value).first
    assert where(fault) == (module, operation, "forward")


@pytest.mark.parametrize(("function", "value", "module", "operation"), FORWARD[1:10:4])
def test_what_is_compiled(function, value, module, operation):
    fault = diagnose(jax.jit(function), value).first
    assert where(fault) == (module, operation, "forward")


def test_a_fault_in_full():
    def loss(x):
        with jax.named_scope("encoder"), jax.named_scope("grow"):
            return jnp.exp(x).sum()

    fault = diagnose(loss, half(20, 1)).first
    assert (fault.module, fault.role, fault.kind) == ("encoder.grow", "output", "inf")
    assert (fault.dtype, fault.shape, fault.largest) == ("float16", (2,), 20.0)
    assert not fault.in_float32
    line = loss.__code__.co_firstlineno + 2
    assert fault.source.startswith(f"{__file__}:{line} (")
    assert fault.source.endswith("loss)")
    assert f"in {fault.source}" in str(fault)


def test_what_float32_makes_too_is_told_so():
    assert diagnose(by_hand, single(200, 1)).first.in_float32
    assert diagnose(scoped("grow", lambda x: jnp.exp(x).sum()), half(200, 1)).first.in_float32


@pytest.mark.parametrize("kind", [np.nan, np.inf])
def test_data_that_is_not_finite_is_named(kind):
    weights, inputs = {"w": [single(1, 2)]}, np.array([1.0, kind], "float32")
    fault = diagnose(lambda p, x: (p["w"][0] * x).sum(), weights, inputs).first
    assert where(fault) == ("args[1]", "data", "forward")
    fault = diagnose(lambda p, x: (p["w"][0] * x).sum(), {"w": [single(kind, 2)]}, x=inputs).first
    assert where(fault) == ("args[0]['w'][0]", "data", "forward")
    fault = diagnose(lambda p, x: (p["w"][0] * x).sum(), weights, x=inputs).first
    assert where(fault) == ("kwargs['x']", "data", "forward")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    scale: Any

    def loss(self, x):
        return (self.scale * x).sum()


def test_what_belongs_to_a_method_is_data():
    assert diagnose(Model(single(np.nan)).loss, single(1)).first.module == "function.scale"


def test_what_a_function_closes_over_is_data():
    held = single(1, np.nan)
    assert where(diagnose(lambda x: (x * held).sum(), single(1, 1)).first)[:2] == (
        "held",
        "data",
    )


def test_the_rules_of_autocast_are_seen():
    def loss(w, x):
        product = scoped("ff", jnp.matmul)(x, w)
        return jnp.tanh(product).mean()

    weights, inputs = jnp.full((64, 4), 1e3), jnp.full((2, 64), 1e2)
    assert not diagnose(loss, weights, inputs)
    assert not diagnose(autocast(loss, "mixed_bfloat16"), weights, inputs)
    fault = diagnose(autocast(loss, "mixed_float16"), weights, inputs).first
    assert where(fault) == ("ff", "dot_general", "forward")
    fault = diagnose(autocast(loss, "mixed_float16"), weights * 1e3, inputs).first
    assert where(fault) == ("ff", "cast", "forward")


def test_what_jax_itself_is_asked_to_look_for_does_not_disturb():
    with jax.debug_nans(True):
        assert diagnose(by_hand, half(20, 1)).first.operation == "exp"


def test_a_device_mesh_is_gone_through_as_a_whole():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    part = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(jnp.exp, mesh=mesh, in_specs=part, out_specs=part)
    fault = diagnose(lambda x: scoped("all", mapped)(x).sum(), half(20, 1)).first
    assert where(fault) == ("all", "shard_map", "forward")


def test_no_function():
    with pytest.raises(
        UsageError, match=r"needs a function, got Array.* Write diagnose\(function,"
    ):
        diagnose(jnp.float32(1.0))


def test_a_function_without_a_gradient_is_looked_at_forward_if_one_says_so():
    loop = scoped("loop", lambda x: lax.while_loop(jnp.isfinite, lambda c: c * 2, x))
    with pytest.raises(UsageError, match=r"has a gradient.*argnums=\(\)"):
        diagnose(lambda x: jnp.minimum(loop(x), 3.0), jnp.float32(1.0))
    assert where(diagnose(loop, HALF(1), argnums=()).first) == ("loop", "mul", "forward")


@functools.partial(jax.jit, static_argnames="power")
def powered(x, power):
    return (x**power).sum()


def test_static_arguments_stay_static():
    assert diagnose(powered, half(300), power=2).first.operation == "integer_pow"
    assert not diagnose(powered, half(200), power=2)
