"""A backward that is not linear is handed true cotangents, wherever in a region it stands."""

from functools import partial

import jax
import pytest
from jax import lax
from jax import numpy as jnp

from halfstep.jax import autocast
from tests.jax.backwards import (
    F16,
    OWN,
    PROGRAMS,
    W,
    X,
    by_norm,
    nested,
    nested_layers,
    plain,
    worst,
)

NAMES = ["clip", "norm", "unit", "sign"]


def gradients(function, w=W, x=X):
    """Returns the gradients of a region in each order with jit."""
    cast = autocast(function, F16)
    both = jax.jit(jax.grad(cast, (0, 1))), jax.grad(jax.jit(cast), (0, 1))
    return [jax.grad(cast, (0, 1))(w, x), *(each(w, x) for each in both)]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("factor", [1e-6, 1.0, 1e4])
def test_gradients_are_those_of_float32(name, program, factor):
    def function(w, x):
        return factor * program(OWN[name], w, x)

    true = jax.grad(function, (0, 1))(W, X)
    for ours in gradients(function):
        assert worst(ours, true) < 0.01


if __name__ == "__main__":
    pass
