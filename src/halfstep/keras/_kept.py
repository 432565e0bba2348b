"""What is kept wide, and why: the tables."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from halfstep.core import replace
from halfstep.keras._patches import Undo, replace_property
from halfstep.keras._policies import LOW
from halfstep.keras._private import backend, found
from halfstep.keras._wide import (
    low_dtype,
    lowered,
    notes,
    run_wide,
    run_wide_when_handed_out,
    widened,
)

_SMALL = "small probabilities round to 0 and their gradients overflow"
_LONG = "long sums lose their small terms and overflow"
_GROWS = "it grows past the range of float16"
_RAW = "its inputs are raw data, which may lie outside the range of float16"
_STATISTICS = "statistics need more digits than 16 bits have"

# Below every form in which Keras offers them: `keras.ops`, activations, layers and operators.
_OPERATIONS = {
    "backend.nn.softmax": _SMALL,
    "backend.nn.log_softmax": _SMALL,
    "backend.nn.log_sigmoid": _SMALL,
    "backend.math.logsumexp": _GROWS,
    "backend.nn.average_pool": _LONG,
    "backend.nn.adaptive_average_pool": _LONG,
    "backend.nn.moments": _STATISTICS,
    "backend.linalg.norm": _LONG,
    "backend.numpy.mean": _LONG,
    "backend.numpy.prod": _GROWS,
    "backend.numpy.std": _STATISTICS,
    "backend.numpy.sum": _LONG,
    "backend.numpy.var": _STATISTICS,
    "ops.nn._normalize": _STATISTICS,
}

# Sound in the low format unless their result meets a loss.
_HANDED_OUT = {
    "backend.nn.sigmoid": _SMALL,
    "backend.nn.softplus": _GROWS,
    "backend.numpy.exp": _GROWS,
    "backend.numpy.expm1": _GROWS,
}

_LAYERS = {
    "layers.Softmax": _SMALL,
    "layers.GlobalAveragePooling1D": _LONG,
    "layers.GlobalAveragePooling2D": _LONG,
    "layers.GlobalAveragePooling3D": _LONG,
}

_RAW_DATA = ("layers.Normalization", "layers.Rescaling")

# They keep their statistics in float32 by themselves.
BY_KERAS = {
    "BatchNormalization": _STATISTICS,
    "GroupNormalization": _STATISTICS,
    "LayerNormalization": _STATISTICS,
    "RMSNormalization": _STATISTICS,
}

_ATTENTION = "dot_product_attention: its kernel computes the softmax in float32"
_NO_KERNEL = "dot_product_attention: JAX has none for float16 on a CPU"

_REGULARIZERS = ("L1", "L1L2", "L2", "OrthogonalRegularizer")


def raw_data(layer: Any) -> str | None:
    """Returns why a layer as a whole computes in float32, if it does."""
    return _RAW if isinstance(layer, tuple(map(found, _RAW_DATA))) else None


def install() -> Iterator[Undo]:
    """Keeps all of it wide, and yields what undoes each change."""
    for around, table in ((run_wide, _OPERATIONS), (run_wide_when_handed_out, _HANDED_OUT)):
        for path, reason in table.items():
            yield _replaced(path, around(f"{path.rpartition('.')[2].strip('_')}: {reason}"))
    yield _replaced("backend.nn.dot_product_attention", _attention)
    for path, reason in _LAYERS.items():
        yield _replaced(f"{path}.call", _wide_layer(reason))
    for path in _RAW_DATA:
        yield replace_property(found(path), "compute_dtype", _not_low)
    for name in _REGULARIZERS:
        yield _replaced(f"regularizers.regularizers.{name}.__call__", _of_widened)
    yield _replaced("layers.SpectralNormalization.call", _with_wide_variables)
    yield _replaced("layers.Layer.add_loss", _of_widened)


def _replaced(path: str, around: Callable[..., Any]) -> Undo:
    owner, _, name = path.rpartition(".")
    return replace(found(owner), name, around)


def _not_low(dtype: str) -> str:
    return "float32" if dtype in LOW else dtype


def _wide_layer(reason: str) -> Callable[..., Any]:
    run = run_wide(f"all of it: {reason}")

    def around(
        original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        return run(functools.partial(original, layer), inputs, *args, **kwargs)

    return around


def _of_widened(original: Callable[..., Any], owner: Any, values: Any) -> Any:
    return original(owner, keras.tree.map_structure(widened, values))


def _attention(original: Callable[..., Any], query: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = low_dtype(query)
    if dtype == "float16" and _lacks_float16_attention():
        notes()(_NO_KERNEL)
        args, kwargs = keras.tree.map_structure(_cast_up, (args, kwargs))
        return lowered(original(_cast_up(query), *args, **kwargs), dtype)
    if dtype is not None:
        notes()(_ATTENTION)
    return original(query, *args, **kwargs)


def _cast_up(value: Any) -> Any:
    return value if low_dtype(value) is None else backend.cast(value, "float32")


def _lacks_float16_attention() -> bool:
    if keras.config.backend() != "jax":
        return False
    import jax

    return jax.default_backend() == "cpu"


def _with_wide_variables(
    original: Callable[..., Any], layer: Any, inputs: Any, *args: Any, **kwargs: Any
) -> Any:
    if low_dtype(inputs) is None:
        return original(layer, inputs, *args, **kwargs)
    with backend.AutocastScope(None):
        return original(layer, inputs, *args, **kwargs)
