"""Looking at a run on the JAX backend: without compilation, operation by operation."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import jax
import numpy as np

from halfstep.core import replace

Note = Callable[[str, Any, Any], None]

CASTS = (type(jax.numpy.zeros(())),)

WORDS = {
    "cast": "cast",
    "add_any": "add",
    "conv_general_dilated": "conv",
    "convert_element_type": "cast",
    "div": "divide",
    "dot_general": "matmul",
    "integer_pow": "power",
    "mul": "multiply",
    "pow": "power",
    "reduce_sum": "sum",
    "select_n": "where",
    "sub": "subtract",
}


@contextlib.contextmanager
def watching(note: Note) -> Iterator[None]:
    """Calls `note` after every operation until the block ends."""

    def process(original: Any, trace: Any, primitive: Any, args: Any, params: Any) -> Any:
        result = original(trace, primitive, args, params)
        note(primitive.name, list(args), result)
        return result

    undo = replace(import_module("jax._src.core").EvalTrace, "process_primitive", process)
    try:
        with jax.disable_jit():
            yield
    finally:
        undo()


def whole() -> AbstractContextManager[Any]:
    """Lets a function run compiled until the block ends."""
    return jax.disable_jit(False)


def on_host(value: Any) -> Any:
    """Returns the numbers of a tensor, None while it is being traced."""
    if isinstance(value, jax.core.Tracer):
        return None
    found = np.asarray(value)
    return found if found.dtype == np.float64 else found.astype(np.float32)


def probe(value: Any, note: Callable[[Any], None]) -> Any:
    """Returns the value, whose gradient is handed to `note`."""

    @jax.custom_vjp
    def identity(inner: Any) -> Any:
        return inner

    def backward(_: Any, grad: Any) -> tuple[Any]:
        note(grad)
        return (grad,)

    identity.defvjp(lambda inner: (inner, None), backward)
    return identity(value)


def gradients(loss: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a loss."""
    return list(jax.grad(loss)(list(values)))
