"""The line that builds a layer again, computing in another dtype."""

import inspect
import re
from typing import Any

import keras

_NOT_WRITTEN = ("name", "dtype", "trainable")


def layer_text(layer: Any, dtype: str) -> str:
    """Returns what to write so that a layer computes in a dtype.

    Example:
        >>> import keras
        >>> layer_text(keras.layers.Dense(64, activation="relu", name="expand"), "float32")
        'keras.layers.Dense(64, activation="relu", name="expand", dtype="float32")'
    """
    if not is_kerass(layer):
        return f'{layer.name}.dtype_policy = "{dtype}"  # {layer.name}: {type(layer).__name__}'
    positional, named = [], []
    for name, parameter in inspect.signature(type(layer).__init__).parameters.items():
        value = layer.get_config().get(name, parameter.default)
        if name in _NOT_WRITTEN or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            continue
        if parameter.default is parameter.empty and name != "self":
            positional.append(_text(value))
        elif name != "self" and not _same(value, parameter.default):
            named.append(f"{name}={_text(value)}")
    arguments = [*positional, *named, f'name="{layer.name}"', f'dtype="{dtype}"']
    return f"keras.layers.{type(layer).__name__}({', '.join(arguments)})"


def is_kerass(layer: Any) -> bool:
    """Returns whether a layer is one of Keras' own, which whoever reads it can build again.

    Example:
        >>> import keras
        >>> is_kerass(keras.layers.Dense(1)), is_kerass(keras.Sequential())
        (True, False)
    """
    return getattr(keras.layers, type(layer).__name__, None) is type(layer)


def _same(value: Any, default: Any) -> bool:
    """Returns whether a configuration says what its default says."""
    if isinstance(value, dict) and "class_name" in value:
        given = [each for each in value["config"].values() if each is not None]
        return not given and _snake(value["class_name"]) == default
    if isinstance(value, (list, tuple)) and not isinstance(default, (list, tuple)):
        return all(each == default for each in value)
    if isinstance(value, (list, tuple)):
        return list(value) == list(default)
    return bool(value == default) or (value == "linear" and default is None)


def _text(value: Any) -> str:
    if isinstance(value, dict) and "class_name" in value:
        config = {key: each for key, each in value["config"].items() if each is not None}
        inner = ", ".join(f"{key}={_text(each)}" for key, each in config.items())
        return f"{value['module']}.{value['class_name']}({inner})"
    if isinstance(value, str):
        return f'"{value}"'
    return repr(tuple(value) if isinstance(value, list) else value)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
