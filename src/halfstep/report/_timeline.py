"""The steps of a training as columns, for a plot."""

import math
from collections.abc import Sequence
from typing import Any

from halfstep.core import Report, Step
from halfstep.report._visible import visible

_KEPT = 4000  # steps that are drawn; a screen has fewer columns


def timeline(report: Report) -> dict[str, Any]:
    """Returns the steps as columns of JSON types; what is not finite is null there.

    Every step that was skipped, or whose loss is not finite, is among them. Of others, where there
    are very many, only some are.

    Args:
        report: Whose steps they are.

    Example:
        >>> steps = (Step(1, 0.5, 8.0), Step(2, float("inf"), 8.0))
        >>> timeline(Report(script="a.py", policy="float32", steps=steps))["loss"]
        [0.5, None]
    """
    steps = _thinned(report.steps)
    return {
        "step": [step.number for step in steps],
        "loss": [_finite(step.loss) for step in steps],
        "scale": [_finite(step.scale) for step in steps],
        "skipped": [[step.number, visible(step.reason)] for step in steps if step.skipped],
        "broken": [[step.number, str(step.loss)] for step in steps if _is_broken(step)],
    }


def _thinned(steps: Sequence[Step]) -> Sequence[Step]:
    every = math.ceil(len(steps) / _KEPT) or 1
    last = len(steps) - 1
    return [
        step
        for index, step in enumerate(steps)
        if index % every == 0 or index == last or step.skipped or _is_broken(step)
    ]


def _is_broken(step: Step) -> bool:
    return step.loss is not None and not math.isfinite(step.loss)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
