"""How Keras' side moves a loss scale: in loops that run on the host, and in compiled ones."""

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from halfstep import LossScale
from halfstep.errors import NonFiniteError
from halfstep.keras import LossScaleOptimizer, SkippedStepsWarning
from tests.conformance.front_ends import After
from tests.keras import loops


def eager(rule: LossScale, steps: str) -> Iterator[After]:
    """A loop that calls apply on the host."""
    return _replayed(loops.eager, rule, steps)


def compiled(rule: LossScale, steps: str) -> Iterator[After]:
    """A loop that compiles its step, by the way of the backend."""
    return _replayed(loops.compiled, rule, steps)


def _replayed(loop: Callable[..., Any], rule: LossScale, steps: str) -> Iterator[After]:
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), loss_scale=rule)
    optimizer.scale_loss(1.0)
    step = loop(optimizer, [loops.variable([1.0, 2.0])])
    gradients = {"+": loops.array([1.0, 1.0]), "x": loops.array([1.0, math.nan])}
    for letter in steps:
        with warnings.catch_warnings(), contextlib.suppress(NonFiniteError):
            warnings.simplefilter("ignore", SkippedStepsWarning)
            step(gradients[letter])
        yield After(*optimizer._cell.read(), optimizer.counts.skipped)
