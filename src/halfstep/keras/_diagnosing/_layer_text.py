"""The line that builds a layer again, computing in another dtype."""

import inspect
import re
from typing import Any

import keras

from halfstep.keras._diagnosing._places import Place

_NOT_WRITTEN = ("name", "dtype", "trainable")


def layer_text(layer: Any, dtype: str) -> str:
    """Returns what builds a layer of Keras again so that it computes in a dtype.

    Example:
        >>> import keras
        >>> layer_text(keras.layers.Dense(64, activation="relu", name="expand"), "float32")
        'keras.layers.Dense(64, activation="relu", name="expand", dtype="float32")'
    """
    config, arguments = layer.get_config(), []
    for name, parameter in inspect.signature(type(layer)).parameters.items():
        value = config.get(name, parameter.default)
        if name in _NOT_WRITTEN or parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            continue
        if parameter.default is parameter.empty:
            arguments.append(_text(value))
        elif not _same(name, value, parameter.default):
            arguments.append(f"{name}={_text(value)}")
    arguments += [f'name="{layer.name}"', f'dtype="{dtype}"']
    return f"keras.layers.{type(layer).__name__}({', '.join(arguments)})"


def place_text(place: Place, dtype: str) -> str:
    """Returns what makes a layer of somebody's own compute in a dtype from now on.

    Example:
        >>> place_text(Place("net", None), "float32")
        'model.dtype_policy = "float32"'
    """
    return f'model{_way(place)}.dtype_policy = "{dtype}"'


def _way(place: Place) -> str:
    """Returns how to get at a layer from the model."""
    if place.parent is None:
        return ""
    holder = place.parent.layer
    names = [name for name, each in vars(holder).items() if each is place.layer]
    step = f".{names[0]}" if names else f'.get_layer("{place.layer.name}")'
    return _way(place.parent) + step


def is_kerass(layer: Any) -> bool:
    """Returns whether a layer is one of Keras' own, which whoever reads it can build again.

    Example:
        >>> import keras
        >>> is_kerass(keras.layers.Dense(1)), is_kerass(keras.Sequential())
        (True, False)
    """
    known = getattr(keras.layers, type(layer).__name__, None) is type(layer)
    return known and not isinstance(layer, keras.layers.Lambda)


def _same(name: str, value: Any, default: Any) -> bool:
    """Returns whether a configuration says what its default says."""
    if name == "data_format" and default is None:
        return bool(value == keras.config.image_data_format())
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
