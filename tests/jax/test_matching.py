"""What is no gradient of the parameters is refused by `apply_if_finite` in its own words."""

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax import apply_if_finite

PARAMS = {"w": jnp.ones(2), "b": jnp.ones(1)}
INNER = [optax.sgd(0.1), optax.adamw(0.1)]
WRONG = {
    "one is missing": ({"w": jnp.ones(2)}, r"of the 2 arrays .* got 1 at \['w'\]"),
    "one has another name": ({"w": jnp.ones(2), "c": jnp.ones(1)}, r"got 2 at \['c'\], \['w'\]"),
    "another shape": ({"w": jnp.ones(3), "b": jnp.ones(1)}, r"\(2,\) at \['w'\], got \(3,\)"),
    "another structure": ([jnp.ones(1), jnp.ones(2)], r"got 2 at \[0\], \[1\]"),
    "nothing": (None, "got 0 at nothing"),
    "with the loss": ((1.0, PARAMS), r"got 3 at \[0\], \[1\]\['b'\], \[1\]\['w'\]"),
}


@pytest.mark.parametrize("compiled", [lambda function: function, jax.jit])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("name", WRONG)
def test_gradients_that_are_not_like_the_parameters(name, inner, compiled):
    updates, text = WRONG[name]
    optimizer = apply_if_finite(inner, loss_scale="dynamic")
    with pytest.raises(UsageError, match=rf"{text}\. Write jax.grad\(loss\)\(params\)"):
        compiled(optimizer.update)(updates, optimizer.init(PARAMS), PARAMS)


def test_parameters_that_are_not_those_of_the_state():
    optimizer = apply_if_finite(optax.sgd(0.1))
    with pytest.raises(UsageError, match=r"that init was called with at \['w'\], got 2"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), {"w": jnp.ones(2)})


def test_without_parameters_it_is_the_inner_transformation_that_knows():
    optimizer = apply_if_finite(optax.adam(0.1))
    state = optimizer.init(PARAMS)
    with pytest.raises(UsageError, match=r"got \['c'\], \['w'\], of which it says: "):
        optimizer.update({"w": jnp.ones(2), "c": jnp.ones(1)}, state)
    with pytest.raises(UsageError, match="of the 2 arrays that init was called with, got 1"):
        optimizer.update({"w": jnp.ones(2)}, state)


def test_the_state_of_another_transformation():
    inner = optax.adam(0.1)
    optimizer = apply_if_finite(inner)
    with pytest.raises(UsageError, match=r"ApplyIfFiniteState, got a tuple\. Write opt_state = "):
        optimizer.update(PARAMS, inner.init(PARAMS), PARAMS)


def test_a_part_of_the_parameters_may_be_no_array():
    params = {**PARAMS, "activation": jnp.tanh}
    optimizer = apply_if_finite(optax.sgd(0.5))
    updates, _ = optimizer.update({**PARAMS, "activation": None}, optimizer.init(PARAMS), params)
    assert np.allclose(updates["w"], -0.5)
