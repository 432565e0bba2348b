"""Looking at a run on the TensorFlow backend, which tells of each operation as it executes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import keras
import numpy as np
import tensorflow as tf

Note = Callable[[str, Any, Any], None]

CASTS = (tf.Tensor,)

WORDS = {
    "cast": "cast",
    "Add": "add",
    "AddN": "add",
    "AddV2": "add",
    "BatchMatMulV2": "matmul",
    "BiasAdd": "add",
    "Conv2D": "conv",
    "Conv2DBackpropFilter": "conv",
    "Conv2DBackpropInput": "conv",
    "Conv3D": "conv",
    "DepthwiseConv2dNative": "conv",
    "DivNoNan": "divide",
    "MatMul": "matmul",
    "Mul": "multiply",
    "Pow": "power",
    "RealDiv": "divide",
    "SelectV2": "where",
    "Sub": "subtract",
}


@contextlib.contextmanager
def watching(note: Note) -> Iterator[None]:
    """Calls `note` after every operation until the block ends."""
    callbacks = import_module("tensorflow.python.framework.op_callbacks")

    def called(op_type: Any, inputs: Any, attrs: Any, outputs: Any, *_: Any, **__: Any) -> None:
        note(_text(op_type), list(inputs), list(outputs))

    callbacks.add_op_callback(called)
    try:
        yield
    finally:
        callbacks.remove_op_callback(called)


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def whole() -> AbstractContextManager[Any]:
    """Lets a function run as it is, which is as a whole."""
    return contextlib.nullcontext()


def on_host(value: Any) -> Any:
    """Returns the numbers of a tensor, None while it is being traced."""
    if isinstance(value, tf.IndexedSlices):
        value = value.values
    if not hasattr(value, "numpy"):
        return None
    found = value.numpy()
    return found if found.dtype == np.float64 else found.astype(np.float32)


def probe(value: Any, note: Callable[[Any], None]) -> Any:
    """Returns the value, whose gradient is handed to `note`."""

    @tf.custom_gradient
    def identity(inner: Any) -> Any:
        def backward(grad: Any) -> Any:
            note(grad)
            return grad

        return tf.identity(inner), backward

    return identity(value)


def gradients(loss: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a loss."""
    tensors = [keras.ops.convert_to_tensor(each) for each in values]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(tensors)
        total = loss(tensors)
    return list(tape.gradient(total, tensors))
