"""Skipped steps: how many, and when to speak about them."""

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from keras import ops

from halfstep.core import LossScale, ScaleState
from halfstep.errors import NonFiniteError
from halfstep.keras._stepping._backend import backend

Culprits = tuple[tuple[str, str], ...]

_SHOWN = 5
_FIRST = 25


class SkippedStepsWarning(UserWarning):
    """Many optimizer steps in a row were skipped, so that training stands still."""


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
        self._level = 0

    def tell(self, counts: StepCounts, names: Culprits) -> None:
        """Speaks about the steps that were skipped in a row, if there is something new to say."""
        row = counts.consecutive_skips
        if self.limit is not None and row >= self.limit:
            raise NonFiniteError(
                f"LossScaleOptimizer needs fewer than max_consecutive_skips={self.limit} skipped "
                f"steps in a row, got {row}, because gradients were not finite. {_advice(names)}"
            )
        level, self._level = self._level, (row // _FIRST).bit_length()
        if self._level > level:
            text = (
                f"{row} optimizer steps in a row were skipped, because gradients were not finite "
                f"at loss scale {counts.scale:g}. {_advice(names)}"
            )
            warnings.warn(SkippedStepsWarning(text), stacklevel=levels_to_user())


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


def listed(names: Culprits) -> str:
    """Returns the first few paths and kinds in words.

    Example:
        >>> listed((("dense/kernel", "inf"),))
        'dense/kernel (inf)'
    """
    shown = ", ".join(f"{path} ({kind})" for path, kind in names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def _advice(names: Culprits) -> str:
    if names:
        who = f"Variables with non-finite gradients: {listed(names)}."
    else:
        who = "Which ones is not known: they were in another replica than the first."
    return (
        f'{who} Give the layers behind them dtype="float32", use mixed_bfloat16, or lower the '
        "learning rate; if the loss itself is not finite, no loss scale helps."
    )


def levels_to_user() -> int:
    """Returns the stack level of a warning that the caller wants to show in the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("halfstep.", "keras.")):
        level, frame = level + 1, frame.f_back
    return level
