"""Numbers that somebody wrote and float16 cannot hold are named, with what to write instead."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from halfstep.jax import diagnose
from tests.jax.diagnosing import half, scoped, single, where

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
HALF = jnp.float16
KEEP = jnp.array([1, 0, 1], HALF)
with np.errstate(over="ignore"):
    LARGE = jnp.asarray(1e6, HALF)


def masked(number):
    return lambda x: jax.nn.softmax(x + (1 - KEEP) * number())[0]


def chosen(number):
    return lambda x: jax.nn.softmax(jnp.where(x > 5, x, number())).sum()


def total(x):
    return jnp.sum(x, dtype=jnp.float32)


# How it is written, as a text, with what takes it.
FACTORS = {
    "HALF(1e6)": lambda x: total(x * HALF(1e6)),
    "np.float16(1e6)": lambda x: total(x * np.float16(1e6)),
    "jnp.asarray(1e6, HALF)": lambda x: total(x + jnp.asarray(1e6, HALF)),
    "1e6": lambda x: total(x * 1e6),
    "jnp.full((3,), 1e6, HALF)": lambda x: total(x * jnp.full((3,), 1e6, HALF)),
    "jnp.array([1, 1e6, 1], HALF)": lambda x: total(x * jnp.array([1, 1e6, 1], HALF)),
    "LARGE": lambda x: total(x * LARGE),
}


@pytest.mark.parametrize("compiled", [lambda function: function, jax.jit])
@pytest.mark.parametrize("text", FACTORS)
def test_a_factor_is_named_and_goes_into_float32(text, compiled):
    fault = diagnose(compiled(scoped("grow", FACTORS[text])), half(1, 2, 3)).first
    assert where(fault) == ("grow", "cast", "forward") or text.startswith(("jnp.array", "LARGE"))
    assert (fault.role, fault.kind, fault.dtype) == ("constant", "inf", "float16")
    assert (fault.largest, fault.in_float32) == (1e6, False)
    assert "became inf in the forward pass, in the cast to float16, which ends at 65504" in str(
        fault
    )
    assert fault.source.startswith(__file__)
    number, _, _ = fault.remedy.partition("  #")
    wide = eval(number)
    number = wide if isinstance(wide, jnp.ndarray) else wide(1e6)
    with jax.numpy_dtype_promotion("standard"):
        # The gradient of an argument in float16 is in float16, whatever it is multiplied by.
        assert not diagnose(lambda x: total(x * number), half(1, 2, 3), argnums=())


MASKS = {
    "times what is left out": (masked, lambda: jnp.asarray(-1e9, HALF)),
    "as a number of Python": (masked, lambda: -1e9),
    "of a row that is left out whole": (chosen, lambda: -1e9),
    "of NumPy": (chosen, lambda: np.float16(-1e9)),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_ends_where_its_format_does(name):
    make, number = MASKS[name]
    with jax.numpy_dtype_promotion("standard"):
        fault = diagnose(scoped("attend", make(number)), half(1, 2, 3)).first
        assert (fault.module, fault.operation, fault.parameter) == ("attend", "cast", "-1e+09")
        line, _, why = fault.remedy.partition("  # ")
        assert (line, why) == (
            "jnp.finfo(jnp.float16).min / 2",
            "in place of -1e+09, which float16 cannot hold",
        )
        assert not diagnose(make(lambda: eval(line)), half(1, 2, 3))


def test_a_large_negative_factor_is_no_mask():
    with jax.numpy_dtype_promotion("standard"):
        fault = diagnose(lambda x: total(x * -1e5), half(1, 2, 3)).first
    assert fault.remedy.startswith("jnp.float32(-100000)")


EPSILONS = {
    "sum": lambda x, e: (x / (x.sum() + e)).sum(),
    "root": lambda x, e: (x / (jnp.sqrt(x) + e)).sum(),
    "maximum": lambda x, e: (x / jnp.maximum(x, e)).sum(),
}


@pytest.mark.parametrize("name", EPSILONS)
def test_an_epsilon_that_is_0_in_float16(name):
    function = scoped("norm", EPSILONS[name])
    with jax.numpy_dtype_promotion("standard"):
        fault = diagnose(lambda x: function(x, 1e-9), half(0, 0), argnums=()).first
        assert where(fault) == ("norm", "div", "forward")
        assert not fault.in_float32
        assert fault.remedy == "epsilon = 0.0001  # in place of 1e-09, which is 0 in float16"
        assert not diagnose(lambda x: function(x, 0.0001), half(0, 0), argnums=())


def test_a_divisor_that_is_0_in_float16():
    with jax.numpy_dtype_promotion("standard"):
        fault = diagnose(lambda x: total(x / 1e-9), half(1, 2), argnums=()).first
        assert fault.remedy.startswith("jnp.float32(1e-09)  # in place of 1e-09, which float16 rou")
        assert not diagnose(lambda x: total(x / jnp.float32(1e-9)), half(1, 2), argnums=())


FINE = {
    "a bound": lambda x: jnp.clip(x, -1e6, 1e6).sum(),
    "a minimum": lambda x: jnp.minimum(x, 1e6).sum(),
    "a comparison": lambda x: jnp.where(x < 1e6, x, 0).sum(),
    "a mask": lambda x: jax.nn.softmax(jnp.where(x > 1, x, -1e9))[0],
    "an inf that is meant": lambda x: jnp.min(x, initial=jnp.inf),
}


@pytest.mark.parametrize("name", FINE)
def test_a_number_that_bounds_is_no_fault(name):
    with jax.numpy_dtype_promotion("standard"):
        assert not diagnose(FINE[name], half(1, 2, 3))


CASTS = {
    "astype": lambda p, x: total(p["w"].astype(HALF) * x),
    "asarray": lambda p, x: total(jnp.asarray(p["w"], HALF) * x),
    "all at once": lambda p, x: total(jax.tree.map(lambda leaf: leaf.astype(HALF), p)["w"] * x),
    "after a reshape": lambda p, x: total(p["w"].reshape(-1).astype(HALF) * x),
}


@pytest.mark.parametrize("compiled", [lambda function: function, jax.jit])
@pytest.mark.parametrize("name", CASTS)
def test_an_argument_that_is_cast_has_its_name(name, compiled):
    function = scoped("net", CASTS[name])
    fault = diagnose(compiled(function), {"w": single(1e6)}, half(1)).first
    assert (fault.module, fault.operation, fault.role) == ("net", "cast", "input")
    assert fault.parameter == "args[0]['w']"
    assert str(fault).startswith("net: args[0]['w'] became inf in the forward pass, in the cast")
    cast = "jnp.float32  # in place of jnp.float16 in this cast of args[0]['w']"
    assert fault.remedy == cast


def test_an_argument_by_name_and_in_a_loop():
    fault = diagnose(lambda x: total(x.astype(HALF)), x=single(1e6)).first
    assert fault.parameter == "kwargs['x']"

    def turn(carry, row):
        return carry + total(row.astype(HALF)), None

    rows = jnp.zeros((5, 2)).at[3].set(1e6)
    fault = diagnose(lambda x: jax.lax.scan(turn, jnp.float32(0), x)[0], rows).first
    assert (fault.parameter, fault.note) == ("args[0][3]", "in turn 4 of 5 of its loop")
