"""Skipped steps: how many, and when to speak about them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from keras import ops

from halfstep.core import (
    Culprits,
    LossScale,
    ScaleState,
    SkippedStepsWarning,
    culprits_text,
    levels_to_user,
    tell_skips,
    where_from,
)
from halfstep.errors import NonFiniteError
from halfstep.keras._stepping._backend import backend

# A scale that starts too high is there after this many skips: it was 256 times too high.
_SEARCHING = 8


@dataclass(frozen=True)
class StepCounts:
    """What a loss-scale optimizer counted, and its scale.

    Args:
        steps: How many steps were asked for.
        skipped: How many of them were skipped, because a gradient was not finite.
        consecutive_skips: How many of the latest steps were skipped in a row.
        scale: What the loss is multiplied by now.

    Example:
        >>> StepCounts(steps=24, skipped=1, consecutive_skips=0, scale=16384.0).skipped
        1
    """

    steps: int
    skipped: int
    consecutive_skips: int
    scale: float


class Standstill:
    """Warns ever more rarely while steps are skipped, or raises an error if asked to.

    Args:
        limit: After how many skipped steps in a row to raise an error; None for never.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.restart(StepCounts(0, 0, 0, 1.0))

    def restart(self, counts: StepCounts) -> None:
        """Notes that what was counted so far belongs to an earlier training."""
        self._row, self._told, self._finished = 0, False, counts

    def tell(self, counts: StepCounts, names: Culprits) -> None:
        """Speaks about the steps that were skipped in a row, if there is something new to say."""
        before, self._row = self._row, counts.consecutive_skips
        why = _because(counts, names)
        spoke = tell_skips("LossScaleOptimizer", self.limit, before, self._row, lambda: why)
        self._told = spoke or (self._told and self._row >= before)

    def finish(self, counts: StepCounts, names: Culprits) -> None:
        """Speaks at the end of a training, too, if most of its steps and the last were skipped."""
        before = self._finished
        self.tell(counts, names)
        steps, skipped = counts.steps - before.steps, counts.skipped - before.skipped
        if self._row and skipped > max(steps / 2, _SEARCHING) and not self._told:
            text = f"{skipped} of {steps} optimizer steps were skipped, {_because(counts, names)}"
            warnings.warn(SkippedStepsWarning(text), stacklevel=levels_to_user())
        self._told, self._finished = False, counts


def _because(counts: StepCounts, names: Culprits) -> str:
    return f"because gradients were not finite at loss scale {counts.scale:g}. {_advice(names)}"


def refuse_floor(rule: LossScale, before: ScaleState, names: Culprits) -> None:
    """Raises an error if an overflow found a scale that can go no lower."""
    patient = before.overflows + 1 < rule.hysteresis
    if rule.at_floor(before) and not patient:
        raise NonFiniteError(
            "LossScaleOptimizer needs finite gradients at its smallest scale, but they were not at "
            f"{before.scale:g}, and min_scale lets it go no lower. {_advice(names)}"
        )


def culprits(received: Sequence[tuple[Any, Any]]) -> Culprits:
    """Returns the path of each variable whose gradient is not finite, and what it holds."""
    kinds = [(path_of(variable), _kind(grad)) for grad, variable in received]
    return tuple((path, kind) for path, kind in kinds if kind)


def path_of(variable: Any) -> str:
    """Returns the path of a variable, which begins with that of its layer."""
    # A tf.Variable of a custom loop has a name only.
    return str(getattr(variable, "path", variable.name))


def _kind(grad: Any) -> str:
    values = numpy.asarray(ops.convert_to_numpy(backend().values(grad)), numpy.float32)
    held = {"inf": numpy.isinf(values).any(), "nan": numpy.isnan(values).any()}
    return " and ".join(kind for kind, found in held.items() if found)


def _advice(names: Culprits) -> str:
    if names:
        who = f"Variables with non-finite gradients: {culprits_text(names)}."
    else:
        who = "Which ones is not known: they were in another replica than the first."
    return (
        f'{who} Give the layers behind them dtype="float32", use mixed_bfloat16, or lower the '
        "learning rate; if the loss itself is not finite, no loss scale helps. "
        f"{where_from('keras')}"
    )
