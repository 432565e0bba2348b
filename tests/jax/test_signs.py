from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from halfstep.jax import DynamicLossScale
from halfstep.jax._signs import scale_in, signs_of
from halfstep.jax._steps import Call, Function, Given

ONE, TWO, MANY = jnp.float32(1.0), jnp.float32(2.0), jnp.ones(3)


class State(NamedTuple):
    """What goes in and out of a step."""

    params: jax.Array
    learning_rate: jax.Array


def signs(result, *args, loss=None):
    return signs_of(Call(Given(print, Function(), loss=loss), args, {}, result)).read()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (ONE, 1.0),
        ((MANY, ONE), 1.0),
        ((MANY, {"accuracy": TWO, "loss": ONE}), 1.0),
        ((MANY, {"accuracy": TWO, "train_loss": ONE, "loss_scale": TWO}), 1.0),
        ((State(MANY, TWO), ONE), 1.0),
        ((State(MANY, TWO),), None),
        ((MANY, ONE, TWO), None),
        ((MANY, jnp.int32(3)), None),
    ],
)
def test_the_loss_is_what_is_clearly_one(result, expected):
    assert signs(result, State(MANY, TWO)).loss == expected


def test_what_is_known_to_be_the_loss_is():
    assert signs((ONE, TWO), MANY, loss=lambda result: result[1]).loss == 2.0


class Scaled(NamedTuple):
    """As Flax names a scale, which begins as a number of Python."""

    scale: float


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"params": MANY, "scale": DynamicLossScale("dynamic(init_scale=8.0)")}, 8.0),
        ({"loss_scale": TWO}, 2.0),
        (Scaled(65536.0), 65536.0),
        ({"norm": {"scale": MANY}}, None),
        (MANY, None),
    ],
)
def test_the_scale_is_found_wherever_it_is(tree, expected):
    assert scale_in(tree) == expected


def test_a_scale_that_is_lower_afterwards_backed_off():
    high, low = {"loss_scale": TWO}, {"loss_scale": ONE}
    assert signs(low, high).backed_off
    assert not signs(high, low).backed_off
    assert not signs(MANY, high).backed_off


def test_what_is_not_finite_is_counted_array_by_array():
    result = {"a": jnp.array([1.0, jnp.inf]), "b": MANY, "c": jnp.nan * ONE, "d": jnp.arange(2)}
    assert signs(result).broken == 2


@pytest.mark.parametrize("finite", [True, False])
def test_what_was_applied_only_if_finite_says_so(finite):
    assert bool(signs({"last_finite": jnp.array(finite)}).sound) is finite
