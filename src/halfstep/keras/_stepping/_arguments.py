"""What optimizers around other optimizers are given."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from halfstep.errors import UsageError


def variables_for(
    optimizer: Any, grads: Sequence[Any], variables: Iterable[Any] | None
) -> list[Any]:
    """Returns the variables of the gradients, and builds the optimizer in its first step.

    Args:
        optimizer: The optimizer whose `apply` was called.
        grads: Its first argument.
        variables: Its second one, by default the variables that it was built for.
    """
    who = f"{type(optimizer).__name__}.apply"
    if variables is None and not optimizer.built:
        raise UsageError(
            f"{who} needs the variables in its first call, got gradients only. Pass them, or call "
            "optimizer.build(variables) before."
        )
    chosen = list(optimizer._trainable_variables if variables is None else variables)
    if len(chosen) != len(grads):
        raise UsageError(
            f"{who} needs one gradient for each of {len(chosen)} variables, got {len(grads)}. "
            "Write None for a variable without gradient."
        )
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(chosen)
    optimizer._check_variables_are_known(chosen)
    return chosen


def has_dtype(variable: Any, *dtypes: str) -> bool:
    """Returns whether a variable of Keras or of the backend has one of these dtypes."""
    return str(keras.backend.standardize_dtype(variable.dtype)) in dtypes


def trainers(optimizer: Any) -> list[Any]:
    """Returns the optimizers that train: several in a MultiOptimizer."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def refuse_wrapped(optimizer: Any, around: type, wrappers: tuple[type, ...]) -> None:
    """Raises an error for what is no optimizer, or for a wrapper that belongs further outside."""
    name = around.__name__
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"{name} needs a Keras optimizer, got {optimizer!r}. "
            f"Write for example {name}(keras.optimizers.Adam())."
        )
    if isinstance(optimizer, wrappers):
        raise UsageError(
            f"{name} needs an optimizer that trains, got a {type(optimizer).__name__}. "
            "Write LossScaleOptimizer(MasterOptimizer(...)), with at most one of each."
        )
