"""What differs between the backends of Keras, each in a module with the same functions.

* `divided(grads, scale)`: the gradients over the scale, at least in float32; None stays None.
* `all_finite(grads, undivided)`: whether every number is finite, as a tensor, for all replicas
  together. It may look at what they were divided from: numbers and scale, None where they are not.
* `host(value)`: the numbers of a tensor, as Python has them.
* `known(finite)`: the same as a bool where the host may look at it now, else None.
* `branch(finite, grads, update, cell, written)`: the step where the host does not know.
* `wide_product(scale, factor)`: their product rounded once to float32.
* `values(grad)`: the numbers that a gradient holds, without the indices of a sparse one.
* `eager()`: whether an assignment happens once, now, and not in each run of a graph.
* `widened(grad)`: a low-precision gradient in float32, others as they are.
"""

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import keras

from halfstep.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])

_MODULES = {each: f"halfstep.keras._stepping._on_{each}" for each in ("jax", "tensorflow", "torch")}


@functools.cache
def backend() -> ModuleType:
    """Returns the functions for the backend that Keras runs on.

    Raises:
        UsageError: If Keras cannot train on its backend.
    """
    return import_module(_MODULES[name()])


def name() -> str:
    """Returns the name of the backend that Keras runs on.

    Raises:
        UsageError: If Keras cannot train on its backend.
    """
    chosen: str = keras.backend.backend()
    if chosen not in _MODULES:
        raise UsageError(
            f"halfstep.keras needs one of the backends {', '.join(_MODULES)}, got {chosen!r}. "
            "Set KERAS_BACKEND before keras is imported."
        )
    return chosen


def untraced(function: _Function) -> _Function:
    """Marks a function that `torch.compile` runs as it is, because it asks the host what to do."""
    if keras.backend.backend() != "torch":
        return function
    compiler: Any = import_module("torch.compiler")
    return compiler.disable(function)
