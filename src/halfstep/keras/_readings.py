"""What a training has come to, read from the variables of Keras."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import keras

# Returns the present value of a variable, wherever the backend keeps it.
Values = Callable[[Any], Any]


class Sum(NamedTuple):
    """What a metric has added up, and over how much."""

    total: float
    weight: float


@dataclass(frozen=True)
class Reading:
    """What an optimizer has come to.

    Args:
        applied: How many of its steps were taken.
        asked: How many steps it was asked for; None where it does not count them.
        scale: The loss scale.
    """

    applied: float = 0.0
    asked: float | None = None
    scale: float = 1.0


_ON_TENSORFLOW = keras.config.backend() == "tensorflow"


def number(value: Any) -> float:
    """Returns a tensor of one element as a float, which waits for the device.

    Example:
        >>> number(keras.ops.ones(()))
        1.0
    """
    return float(value.numpy() if _ON_TENSORFLOW else value)


def by_variable(variable: Any) -> Any:
    """Returns the value that a variable holds itself."""
    return variable.value


def by_state(model: Any, state: Any) -> Values:
    """Returns what finds values in the state that the JAX backend hands from step to step."""
    _, _, optimizer, metrics = state
    pairs = zip(model.optimizer.variables, optimizer, strict=True)
    values = {id(variable): value for variable, value in pairs}
    values |= {id(v): value for v, value in zip(model.metrics_variables, metrics, strict=True)}
    return lambda variable: values[id(variable)]


def sums(model: Any, values: Values) -> list[Sum]:
    """Returns the running sums of what a model calls a loss."""
    means = (each for each in model.metrics if isinstance(each, keras.metrics.Mean))
    losses = (each for each in means if "loss" in each.name)
    return [Sum(number(values(each.total)), number(values(each.count))) for each in losses]


def reading(
    optimizer: Any, values: Values = by_variable, read: Callable[[Any], Any] = number
) -> Reading:
    """Returns what an optimizer has come to.

    Args:
        optimizer: The one that a model was compiled with, or that a loop calls.
        values: Where the values are.
        read: Makes a number of each.

    Example:
        >>> reading(keras.optimizers.SGD())
        Reading(applied=0.0, asked=None, scale=1.0)
    """
    cell, inner = getattr(optimizer, "_cell", None), optimizer
    for name in ("inner_optimizer", "optimizer"):
        inner = getattr(inner, name, inner)
    # Not its properties: a loss-scale optimizer notes who asks for its scale.
    scale = vars(optimizer).get("dynamic_scale") if cell is None else cell.scale
    found: dict[str, Any] = {"applied": values(inner._iterations)}
    if scale is not None:
        found["scale"] = values(scale)
    if cell is not None:
        found["asked"] = cell.steps(values)
    return replace(first_reading(optimizer), **{name: read(value) for name, value in found.items()})


def first_reading(optimizer: Any) -> Reading:
    """Returns what an optimizer that has no variables yet has come to.

    Example:
        >>> first_reading(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())).scale
        32768.0
    """
    return Reading(scale=getattr(optimizer, "initial_scale", 1.0))
