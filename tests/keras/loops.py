"""The training loops that users write, as functions from an optimizer to a step."""

import functools
from shutil import which

import keras
import numpy as np
import pytest
from keras import ops

BACKEND = keras.backend.backend()

# For what torch.compile compiles.
TORCH_COMPILES = [
    pytest.mark.slow,
    pytest.mark.skipif(not (which("c++") or which("g++")), reason="torch.compile needs a compiler"),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",
    ),
]


def torch_compiles(test):
    """Marks a test in which torch.compile compiles a model."""
    return functools.reduce(lambda marked, mark: mark(marked), TORCH_COMPILES, test)


def array(values, dtype="float32"):
    return ops.convert_to_tensor(np.asarray(values, "float32"), dtype=dtype)


def numbers(value):
    """Returns a variable or tensor as a float32 array."""
    return np.asarray(ops.convert_to_numpy(ops.convert_to_tensor(value)), "float32")


def variable(values, dtype="float32", **settings):
    return keras.Variable(np.asarray(values, "float32"), dtype=dtype, **settings)


def values_of(optimizer):
    """Returns the numbers of all variables of an optimizer."""
    return [numbers(each) for each in optimizer.variables]


def eager(optimizer, variables):
    """A loop that calls apply on the host."""
    if not optimizer.built:
        optimizer.build(variables)
    return lambda *grads: optimizer.apply(list(grads), variables)


def compiled(optimizer, variables):
    """A loop that compiles its step, by the way of the backend."""
    if not optimizer.built:
        optimizer.build(variables)
    return _COMPILED[BACKEND](optimizer, variables)


def _tf_function(optimizer, variables):
    import tensorflow as tf

    return tf.function(lambda *grads: optimizer.apply(list(grads), variables))


def _stateless(optimizer, variables):
    jit = _jit if BACKEND == "jax" else (lambda function: function)
    apply = jit(optimizer.stateless_apply)

    def step(*grads):
        before = [[v.value for v in optimizer.variables], [v.value for v in variables]]
        trained, own = apply(before[0], list(grads), before[1])
        for each, value in zip([*variables, *optimizer.variables], [*trained, *own], strict=True):
            each.assign(value)

    return step


def _jit(function):
    import jax

    return jax.jit(function)


_COMPILED = {"tensorflow": _tf_function, "jax": _stateless, "torch": _stateless}
LOOPS = [eager, compiled]
