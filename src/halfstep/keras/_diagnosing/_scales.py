"""The loss scales that a diagnosis tries."""

from typing import Any

import keras

from halfstep.core import LossScale
from halfstep.errors import UsageError
from halfstep.keras._readings import reading


def scales_of(model: Any, asked: float | None) -> tuple[float, ...]:
    """Returns them in the order in which they are tried.

    A scale that has skipped a step has backed off since, and the step may be fine with it.

    Args:
        model: The model, whose optimizer knows a scale where none is asked for.
        asked: The one that is asked for.

    Raises:
        UsageError: It is not above zero.

    Example:
        >>> scales_of(None, 8.0), scales_of(None, None)
        ((8.0,), (1.0,))
    """
    if asked is None:
        optimizer = getattr(model, "optimizer", None)
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        return _of_optimizer(optimizer) if scales else (1.0,)
    if isinstance(asked, (int, float)) and 0 < asked < float("inf"):
        return (float(asked),)
    raise UsageError(
        f"diagnose needs a loss_scale above zero, got {asked!r}. Write loss_scale=2.0**15."
    )


def _of_optimizer(optimizer: Any) -> tuple[float, ...]:
    first = float(optimizer.initial_scale)
    if not optimizer.built:
        return (first,)
    now, rule = reading(optimizer).scale, getattr(optimizer, "rule", LossScale())
    if not _has_skipped(optimizer, now):
        return (now,)
    before = min(now / rule.backoff_factor, rule.max_scale)
    return tuple(sorted({each for each in (now, before, first) if each >= now}))


def _has_skipped(optimizer: Any, now: float) -> bool:
    counts = getattr(optimizer, "counts", None)
    # Keras' own optimizer does not count.
    return now < optimizer.initial_scale if counts is None else counts.skipped > 0
