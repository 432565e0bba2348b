"""What the tests of `diagnose` share."""

import jax
from jax import numpy as jnp


def scoped(name, function):
    """Returns a function that runs in a named scope."""

    def run(*args):
        with jax.named_scope(name):
            return function(*args)

    return run


def half(*numbers):
    return jnp.array(numbers, jnp.float16)


def single(*numbers):
    return jnp.array(numbers, jnp.float32)


def where(fault):
    return fault and (fault.module, fault.operation, fault.phase)


def is_fine(function, *args):
    """Returns whether a function and its gradient are finite as JAX computes them."""
    results = jax.value_and_grad(function, argnums=tuple(range(len(args))))(*args)
    return all(bool(jnp.isfinite(each).all()) for each in jax.tree.leaves(results))
