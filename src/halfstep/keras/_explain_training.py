"""What is to say about how a model is trained, apart from its layers."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from halfstep.keras._optimizers import optimizers_of, was_asked

_SCALING = {
    (True, True): "scales the loss, because layers compute in float16",
    (True, False): "scales the loss, although no layer computes in float16",
    (False, True): "does not scale the loss, although layers compute in float16",
    (False, False): "does not scale the loss, because no layer computes in float16",
}


def told_of_training(model: Any, layers: Iterable[Any], added: dict[str, str]) -> Iterator[str]:
    """Yields a line for each thing to say.

    Args:
        model: It.
        layers: It and the layers in it, after they ran.
        added: The low dtype of the losses that a layer adds by itself, by its path.
    """
    layers = list(layers)
    compiled = getattr(model, "compiled", False) and model.optimizer is not None
    loss = getattr(model._compile_loss, "dtype", None) if compiled else None
    if loss is not None:
        yield f"losses: computed in {loss}"
    for path, dtype in added.items():
        yield f"add_loss: what {path} adds was computed in {dtype}"
    if compiled:
        yield from _optimizers(model, low=any(each.compute_dtype == "float16" for each in layers))
    for key in _unmatched(layers):
        yield f"policy map: {key!r} matches the path of no layer"


def _optimizers(model: Any, low: bool) -> Iterator[str]:
    found = optimizers_of(model)
    for name, each in found.items():
        scales = isinstance(each, keras.optimizers.LossScaleOptimizer)
        idle = name == "optimizer" and len(found) > 1 and not was_asked(each)
        does = "was not asked for a step so far" if idle else _SCALING[scales, low]
        yield f"{name}: {type(each).__name__} {does}"


def _unmatched(layers: list[Any]) -> list[str]:
    """Returns the keys of policy maps that choose the policy of no layer."""
    maps = [each for each in layers if isinstance(each.dtype_policy, _Map)]
    keys = dict.fromkeys(key for each in maps for key in each.dtype_policy)
    return [key for key in keys if not any(_matches(key, each.path) for each in maps)]


_Map = keras.dtype_policies.DTypePolicyMap


def _matches(key: str, path: str | None) -> bool:
    return path is not None and (key == path or re.fullmatch(key, path) is not None)
