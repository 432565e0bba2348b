"""The policy that `auto` stands for: measured on the backend and the device that Keras is on."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np

from halfstep.core import CHOSEN, Entry, FamilyTimes, Policy, Race, begun, quiet
from halfstep.keras._diagnosing._backend import here
from halfstep.keras._machine import machine

_DTYPES = ("float32", "bfloat16", "float16")
# The shapes of what an operation reads, weights last, and how many of these there are.
_SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "matmul": ((128, 512), (512, 512)),
    "convolution": ((2, 16, 16, 64), (3, 3, 64, 64)),
    "attention": ((2, 128, 4, 64),) * 3,
    "normalisation": ((256, 512), (512,), (512,)),
}
_WEIGHTS = {"matmul": 1, "convolution": 1, "attention": 0, "normalisation": 2}
# XLA makes all else of these, and what it fuses; compiling it would take all of the time.
_OF_JAX = ("matmul", "convolution")


def chosen() -> Policy:
    """Returns the policy that is fastest as a whole: a layer computes in one format.

    Example:
        >>> chosen().rules.edits
        ()
    """
    return CHOSEN.policy(machine(), _measured, whole=True)


def _measured() -> tuple[FamilyTimes, ...]:
    # In a thread of its own nothing of what the caller is in has a say, such as a trace.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_times).result()


def _times() -> tuple[FamilyTimes, ...]:
    # Whoever watches the script takes a gradient for a step of it.
    with quiet("backward", "loss"):
        return _race().times()


def _race() -> Race:
    last: list[Any] = []
    found = calls(last)
    return Race(begun(found) if _is_jax() else found, lambda: wait(last))


def _is_jax() -> bool:
    return bool(keras.config.backend() == "jax")


def wait(last: list[Any]) -> None:
    """Waits for gradients, and all that was computed before: a device does one thing at a time."""
    if last:
        # Not every backend makes an array of bfloat16.
        keras.ops.convert_to_numpy(keras.ops.cast(keras.ops.max(last[0]), "float32"))


def calls(last: list[Any]) -> Mapping[Entry, Callable[[], object]]:
    """Returns what runs each operation forward and backward, in each format.

    Args:
        last: Is filled with the gradients of the last call.

    Example:
        >>> len(calls([])) in (6, 12)
        True
    """
    return {
        Entry(family, "large", dtype): _call(family, dtype, last)
        for family in (_OF_JAX if _is_jax() else _SHAPES)
        for dtype in _DTYPES
    }


def _call(family: str, dtype: str, last: list[Any]) -> Callable[[], object]:
    generator, shapes = np.random.default_rng(0), _SHAPES[family]
    first_weight = len(shapes) - _WEIGHTS[family]
    drawn = [generator.standard_normal(each, np.float32) for each in shapes]
    tensors = [keras.ops.convert_to_tensor(each) for each in drawn]
    inputs = [keras.ops.cast(each, dtype) for each in tensors[:first_weight]]

    def loss(leaves: list[Any]) -> Any:
        cast = [keras.ops.cast(each, dtype) for each in leaves]
        return keras.ops.sum(keras.ops.cast(_FORWARDS[family](*cast), "float32"))

    def run() -> None:
        last[:] = here().gradients(loss, [*inputs, *tensors[first_weight:]])

    return run


def _convolution(inputs: Any, kernel: Any) -> Any:
    return keras.ops.conv(inputs, kernel, padding="same", data_format="channels_last")


def _attention(query: Any, key: Any, value: Any) -> Any:
    return keras.ops.dot_product_attention(query, key, value, is_causal=True)


def _bound_by_memory(inputs: Any, weight: Any, bias: Any) -> Any:
    return inputs + keras.ops.gelu(keras.ops.layer_normalization(inputs, weight, bias))


_FORWARDS: dict[str, Callable[..., Any]] = {
    "matmul": keras.ops.matmul,
    "convolution": _convolution,
    "attention": _attention,
    "normalisation": _bound_by_memory,
}
