"""The loss that a diagnosis runs."""

from collections.abc import Callable
from typing import Any

import keras

from halfstep.errors import UsageError
from halfstep.keras._private import CompileLoss

Compare = Callable[[Any, Any], Any]


def loss_of(model: Any, inputs: Any, targets: Any, loss: Any) -> tuple[Compare | None, str]:
    """Returns what compares targets with outputs, and its name; None if there are no targets.

    Args:
        model: The model, whose own loss is taken where there is no other.
        inputs: What the model is called with, for losses of its own.
        targets: The targets.
        loss: A loss, its name, a function, or several of them; None for the model's.

    Raises:
        UsageError: One of them is missing, or the loss is none.
    """
    if targets is None and loss is None:
        return None, "loss"
    if targets is None:
        raise UsageError(
            f"diagnose needs targets for its loss, got loss={loss!r} alone."
            " Write diagnose(model, inputs, targets, loss)."
        )
    if loss is None:
        return _own(model, inputs), "loss"
    for each in keras.tree.flatten(loss):
        _refuse_unknown(each)
    return _given(model, CompileLoss(loss)), _name(loss)


def _refuse_unknown(loss: Any) -> None:
    try:
        keras.losses.get(loss)
    except (ValueError, TypeError):
        raise UsageError(
            f"diagnose needs a loss of Keras, its name or a function, got {loss!r}."
            ' Write loss="mse".'
        ) from None


def _own(model: Any, inputs: Any) -> Compare:
    if not getattr(model, "compiled", False):
        raise UsageError(
            "diagnose needs a loss for its targets, got none, and the model is not compiled."
            ' Write diagnose(model, inputs, targets, loss="mse").'
        )
    return lambda targets, outputs: model.compute_loss(inputs, targets, outputs)


def _given(model: Any, loss: Any) -> Compare:
    def compare(targets: Any, outputs: Any) -> Any:
        return sum(model.losses, loss(targets, outputs))

    return compare


def _name(loss: Any) -> str:
    if isinstance(loss, str):
        return loss
    named = getattr(loss, "name", None) or getattr(loss, "__name__", None)
    return str(named or type(loss).__name__) if not isinstance(loss, (dict, list)) else "loss"
