"""Looks closely at a step of a Keras script, whoever wrote it, by running its model again."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras

from halfstep.core import Cast, Diagnosis, Ranges, quiet
from halfstep.keras._batches import Values, hand_on
from halfstep.keras._diagnose import diagnose
from halfstep.keras._patches import Undo

_EVENTS = ("backward", "loss", "step", "update", "scale", "region", "metric")


class Seen(NamedTuple):
    """What a look at the numbers of a step has shown.

    Args:
        ranges: Their magnitudes.
        power: The exponent of the scale that multiplied the gradients.
        casts: What was cast.
    """

    ranges: Ranges
    power: int
    casts: tuple[Cast, ...] = ()


class Kept(NamedTuple):
    """What a model was called with.

    Args:
        model: The model.
        values: Its variables, with their values before the step.
        inputs: The inputs.
        targets: The targets, None where there are none.
        loss: What compares them, None for what the model was compiled with.
    """

    model: Any
    values: Values
    inputs: Any
    targets: Any = None
    loss: Any = None

    def diagnosis(self, scale: float) -> Diagnosis:
        """Returns what is wrong with it.

        Args:
            scale: What the loss was multiplied by.
        """
        options = {"loss_scale": scale, "training": True}
        with quiet(*_EVENTS), keras.StatelessScope(self.values):
            return diagnose(self.model, self.inputs, self.targets, self.loss, **options)


class Looking:
    """Keeps what the present step of a script calls its models with, and the step before.

    Example:
        >>> looking = Looking()
        >>> end = looking.start()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="dense")])
        >>> model.layers[0].set_weights([keras.ops.full((4, 1), 1e38), keras.ops.zeros(1)])
        >>> model.compile("sgd", "mse")
        >>> _ = model.fit(keras.ops.ones((2, 4)), keras.ops.ones((2, 1)), verbose=0)
        >>> end()
        >>> fault = looking.faults(scale=1.0).first
        >>> fault.module, fault.operation, fault.phase
        ('dense', 'matmul', 'forward')
    """

    # The loss is a part of what is diagnosed, so nothing broken comes from elsewhere.
    whole, entered_broken = True, False
    notes = ()

    def __init__(self) -> None:
        self._kept: list[Kept] = []
        self._before: list[Kept] = []

    def start(self) -> Undo:
        """Begins to keep batches, and returns what ends it."""
        undo = list(self._install())

        def end() -> None:
            while undo:
                undo.pop()()

        return end

    def forget(self) -> None:
        """The step is over."""
        self._before, self._kept = self._kept or self._before, []

    @property
    def has_calls(self) -> bool:
        """Whether a model was called in the step, by `fit` or by the script."""
        return bool(self._kept)

    def faults(self, scale: float) -> Diagnosis:
        """Returns the first fault of the step in a model, false if there is none.

        Args:
            scale: What the loss was multiplied by.
        """
        found = _first(self._kept, scale)
        return (_is_in_weights(found) and _first(self._before, scale)) or found

    def ranges(self, scale: float) -> Seen | None:
        """Returns what is known of the numbers of the step, None where nothing was kept of it.

        Args:
            scale: What the loss was multiplied by.
        """
        return Seen(Ranges(), math.frexp(scale)[1] - 1) if self._kept else None

    def _install(self) -> Iterator[Undo]:
        yield from hand_on(self._keep)

    def _keep(self, model: Any, values: Values, batch: Any) -> None:
        inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self._kept.append(Kept(model, values, inputs, targets))


def _first(kept: list[Kept], scale: float) -> Diagnosis:
    return next(filter(None, (each.diagnosis(scale) for each in kept)), Diagnosis())


def _is_in_weights(found: Diagnosis) -> bool:
    """Returns whether a weight was broken already, which a step before has done."""
    first = found.first
    return first is not None and (first.operation, first.role) == ("data", "weight")
