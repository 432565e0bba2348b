"""An optimizer that scales the loss, wherever a model computes in float16."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras

from halfstep.core import LossScale, Policy, replace
from halfstep.keras._patches import Undo
from halfstep.keras._policies import needs_scale
from halfstep.keras._private import Trainer, untracked


def install(policy: Policy) -> Iterator[Undo]:
    """Lets `Model.compile` wrap the optimizer where needed, and yields what undoes it."""
    declined = policy.compute_dtype == "float16" and policy.scale.kind == "none"

    @untracked
    def compile_model(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(model, *args, **kwargs)
        wanted = call.arguments.get("auto_scale_loss", True)
        call.arguments["auto_scale_loss"] = False
        result = original(*call.args, **call.kwargs)
        if wanted and not declined and float16_layers(model):
            model.optimizer = scaling(model.optimizer, policy.scale)
        return result

    yield replace(Trainer, "compile", compile_model)


def float16_layers(model: Any) -> list[Any]:
    """Returns the layers of a model that may compute in float16, also those not yet built."""
    return [each for each in model._flatten_layers() if needs_scale(each.dtype_policy)]


def scaling(optimizer: Any, scale: LossScale) -> Any:
    """Returns the optimizer with a loss scale, or as it is where it has one or there is none."""
    if not optimizer or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    from halfstep.keras._loss_scale_optimizer import LossScaleOptimizer

    # A policy that asks for no scale of its own starts at that of Keras, as by hand.
    asked = None if scale in (LossScale.dynamic(), LossScale.none()) else scale
    return LossScaleOptimizer(optimizer, loss_scale=asked, name="loss_scale_optimizer")
