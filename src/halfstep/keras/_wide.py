"""Values that were computed in float32 and are handed on inside a model in its compute dtype.

A wide value is remembered on the low one, as Keras does with the logits of a softmax: who continues
with the low value inside the model pays nothing for it, and who hands it out of the model hands out
the wide one, so that the gradients of a loss never pass through the low format at its widest point.
"""

import threading
from collections.abc import Callable
from typing import Any

import keras

from halfstep.keras._policies import LOW
from halfstep.keras._private import backend, get_tensor_attr, set_tensor_attr

_ATTRIBUTE = "_halfstep_wide"

Note = Callable[[str], None]


class _Watching(threading.local):
    # Returns what takes notes on the layer that runs at the moment.
    place: Callable[[], Note] | None = None


watching = _Watching()


def low_dtype(value: Any) -> str | None:
    """Returns the dtype of a tensor of a 16-bit format, None for anything else.

    Example:
        >>> import keras
        >>> low_dtype(keras.ops.ones((2,), dtype="bfloat16")), low_dtype(1.0)
        ('bfloat16', None)
    """
    if not backend.is_tensor(value):
        return None
    dtype = backend.standardize_dtype(value.dtype)
    return dtype if dtype in LOW else None


def widened(value: Any) -> Any:
    """Returns a low tensor as it was before it was rounded, else cast; anything else as it is.

    Example:
        >>> import keras
        >>> keras.backend.standardize_dtype(widened(keras.ops.ones(2, dtype="float16")).dtype)
        'float32'
    """
    if low_dtype(value) is None:
        return value
    remembered = get_tensor_attr(value, _ATTRIBUTE)
    return backend.cast(value, "float32") if remembered is None else remembered()


def lowered(wide: Any, dtype: str) -> Any:
    """Returns float32 tensors in a low dtype, which remember what they were."""
    return keras.tree.map_structure(lambda each: _lowered(each, dtype), wide)


def remember(value: Any, result: Any, around: Callable[[Any], Any]) -> None:
    """Lets a copy of a tensor remember what the tensor was before it was rounded, if it does."""
    remembered = get_tensor_attr(value, _ATTRIBUTE)
    if remembered is not None:
        set_tensor_attr(result, _ATTRIBUTE, lambda: around(remembered()))


def _lowered(wide: Any, dtype: str) -> Any:
    if not backend.is_tensor(wide) or backend.standardize_dtype(wide.dtype) != "float32":
        return wide
    low = backend.cast(wide, dtype)
    set_tensor_attr(low, _ATTRIBUTE, lambda: wide)
    return low


def run_wide(reason: str) -> Callable[..., Any]:
    """Returns what runs an operation in float32 if its first argument is low.

    Args:
        reason: Why, for whoever watches.
    """

    def around(original: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _read(value)
        dtype = low_dtype(value)
        if dtype is None:
            return original(value, *args, **kwargs)
        notes()(reason)
        return lowered(original(backend.cast(value, "float32"), *args, **kwargs), dtype)

    return around


def run_wide_when_handed_out(reason: str) -> Callable[..., Any]:
    """Returns what runs an operation as it is, and again in float32 if the model hands it out."""

    def around(original: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
        value = _read(value)
        result = original(value, *args, **kwargs)
        if low_dtype(value) is None or low_dtype(result) is None:
            return result
        note = notes()

        def wide() -> Any:
            note(reason)
            return original(backend.cast(value, "float32"), *args, **kwargs)

        set_tensor_attr(result, _ATTRIBUTE, wide)
        return result

    return around


def _read(value: Any) -> Any:
    # A variable reads in the compute dtype of the layer that asks.
    return backend.convert_to_tensor(value) if isinstance(value, keras.Variable) else value


def notes() -> Note:
    """Returns what takes notes on the layer that runs at the moment, if anybody watches.

    Example:
        >>> notes()("nobody watches")
    """
    return _ignored if watching.place is None else watching.place()


def _ignored(_reason: str) -> None:
    pass
