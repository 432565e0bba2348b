import jax
import numpy as np
import pytest
from jax import numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax import autocast, diagnose
from tests.jax.diagnosing import half, is_fine, scoped, single, where


def chosen(condition, function):
    def loss(x):
        return jnp.where(condition(x), scoped("part", function)(x), x * 0).sum()

    return loss


def above(x):
    return x > 0


@jax.custom_vjp
def same(x):
    return x


same.defvjp(lambda x: (x, None), lambda kept, grad: (scoped("rule", lambda g: g / (g - g))(grad),))

# The numbers are at the edge of where the function has a derivative.
BACKWARD = [
    (chosen(above, jnp.sqrt), (4, 0), "part", ("div",), "sqrt"),
    (chosen(above, jnp.log), (4, 0), "part", ("div",), "log"),
    (chosen(above, lambda x: 1 / x), (4, 0), "part", ("integer_pow", "mul"), "div"),
    (chosen(above, jax.lax.rsqrt), (4, 0), "part", ("mul", "div"), "rsqrt"),
    (scoped("norm", jnp.linalg.norm), (0, 0), "norm", ("div",), "sqrt"),
    (scoped("std", jnp.std), (1, 1), "std", ("div",), "sqrt"),
    (scoped("root", lambda x: (x**0.5).sum()), (0, 1), "root", ("pow",), "pow"),
    (scoped("angle", lambda x: jnp.arccos(x).sum()), (1, 0), "angle", ("rsqrt",), "acos"),
    (lambda x: same(x).sum(), (1, 2), "rule", ("div",), ""),
]
LARGE = [
    (chosen(lambda x: x < 20, jnp.exp), (100, 1), "part", ("mul",), "exp"),
    (scoped("soft", lambda x: 1 / (1 + jnp.exp(-x)).sum()), (-100, 1), "soft", ("mul",), "exp"),
]


@pytest.mark.parametrize(("function", "value", "module", "operations", "word"), BACKWARD + LARGE)
def test_what_only_the_gradient_makes(function, value, module, operations, word):
    value = single(*value)
    assert jnp.isfinite(function(value))
    assert not is_fine(function, value)
    fault = diagnose(jax.jit(function), value).first
    assert (fault.module, fault.phase, fault.role) == (module, "backward", "grad_input")
    assert fault.operation in operations
    assert fault.in_float32
    assert bool(fault.remedy) == bool(word)
    assert word in fault.remedy or word in ("div", "acos")


@pytest.mark.parametrize(("function", "value", "module", "operations", "word"), BACKWARD)
def test_low_precision_is_not_to_blame_for_them(function, value, module, operations, word):
    fault = diagnose(function, half(*value)).first
    assert (fault.module, fault.phase, fault.in_float32) == (module, "backward", True)
    assert fault.operation in operations


def test_a_gradient_that_does_not_fit():
    scale = scoped("down", lambda x: (x * jnp.float16(0.01)).astype(jnp.float32) * 2.0**20)
    fault = diagnose(lambda x: scale(x).sum(), half(1, 1)).first
    assert where(fault) == ("down", "cast", "backward")
    assert not fault.in_float32


def test_a_gradient_in_a_loop():
    def loss(x):
        turn = scoped("turn", lambda carry, y: (carry + jnp.sqrt(y) * y, carry))
        return jax.lax.scan(turn, jnp.float32(0), x)[0]

    assert where(diagnose(loss, single(1, 0)).first) == ("turn", "div", "backward")


def test_a_gradient_of_what_is_computed_again():
    loss = jax.checkpoint(lambda x: scoped("again", jnp.sqrt)(x).sum())
    assert where(diagnose(loss, single(0, 1)).first) == ("again", "div", "backward")


def test_a_gradient_in_a_branch():
    root = scoped("taken", jnp.sqrt)
    loss = jax.jit(lambda x: jax.lax.cond(x[0] > 0, root, jnp.sin, x).sum())
    assert where(diagnose(loss, single(1, 0)).first) == ("taken", "div", "backward")
    assert not diagnose(loss, single(0, 0))


def test_what_is_differentiated():
    def loss(x, y):
        return (jnp.sqrt(x) + y).sum()

    assert diagnose(loss, single(0), single(1))
    assert diagnose(loss, single(0), single(1), argnums=0)
    assert not diagnose(loss, single(0), single(1), argnums=1)
    assert not diagnose(loss, single(0), single(1), argnums=(1,))
    assert not diagnose(loss, single(0), single(1), argnums=())


def test_a_function_of_several_results():
    root = scoped("root", jnp.sqrt)
    assert where(diagnose(root, single(0, 1)).first) == ("root", "div", "backward")
    assert diagnose(lambda x: {"a": x, "b": root(x)}, single(0, 1))
    # A loss, and what is not differentiated.
    assert not diagnose(lambda x: (x.sum(), root(x)), single(0, 1))


def test_the_gradient_of_a_region():
    def loss(w, x):
        product = scoped("ff", jnp.matmul)(x, w)
        return scoped("root", lambda v: jnp.where(v > 0, jnp.sqrt(v), 0).sum())(product)

    weights, inputs = jnp.array([[1.0, 0.0]]), jnp.ones((3, 1))
    for policy in ("mixed_float16", "mixed_bfloat16", "float32"):
        fault = diagnose(jax.jit(autocast(loss, policy)), weights, inputs).first
        assert where(fault) == ("root", "div", "backward")


def test_one_that_takes_gradients_itself_is_looked_at_as_it_is():
    loss = chosen(above, jnp.sqrt)
    diagnosis = diagnose(jax.jit(jax.value_and_grad(loss)), single(4, 0))
    assert where(diagnosis.first)[:2] == ("part", "div")
    assert not diagnose(jax.value_and_grad(loss), single(4, 1))


def test_a_mask_in_the_data_is_not_to_blame():
    def attend(x, mask):
        return scoped("attend", lambda v: jnp.exp(v).sum())(x * jnp.exp(x + mask))

    mask = single(0, -np.inf)
    assert not diagnose(attend, single(1, 2), mask, argnums=0)
    fault = diagnose(lambda x, m: (jnp.exp(m) * jnp.sqrt(x)).sum(), single(1, 0), mask).first
    assert where(fault)[1:] == ("div", "backward")


def test_arguments_are_counted_as_jax_counts_them():
    def loss(x, y):
        return jnp.sqrt(x).sum() + y.sum()

    assert diagnose(loss, single(0), single(1), argnums=-2)
    assert not diagnose(loss, single(0), single(1), argnums=-1)


@pytest.mark.parametrize("argnums", [5, -3, 1.5, "x", True, (0, 2)])
def test_an_argument_that_is_not_there_is_an_error(argnums):
    with pytest.raises(UsageError, match=r"argnums from -2 to 1, the places of the 2 arguments"):
        diagnose(lambda x, y: (x * y).sum(), single(1), single(1), argnums=argnums)
