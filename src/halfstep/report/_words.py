"""What a report comes to, in a line or two."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from halfstep.core import SEVERITIES, Fault, Report
from halfstep.report._numbers import number
from halfstep.report._visible import visible


def headline(report: Report) -> str:
    """Returns how the training went, in a line.

    Example:
        >>> from halfstep.core import Step
        >>> steps = (Step(1, 2.0, 8.0), Step(2, 1.0, 4.0, skipped=True))
        >>> headline(Report(script="a.py", policy="mixed_float16", steps=steps))
        '2 steps, 1 skipped; loss 2 to 1; scale 8 to 4'
    """
    losses = [step.loss for step in report.steps if step.loss is not None]
    scales = [step.scale for step in report.steps if step.scale is not None]
    counted = f"{_count(len(report.steps), 'step')}, {len(report.skipped) or 'none'} skipped"
    pieces = [counted, _span("loss", losses), _span("scale", scales)]
    broken = sum(not math.isfinite(loss) for loss in losses)
    if broken:
        pieces.append(f"{_count(broken, 'loss', 'losses')} not finite")
    return "; ".join(filter(None, pieces))


def outcome(report: Report) -> str:
    """Returns how many findings of which severity there are, in a line.

    Example:
        >>> outcome(Report(script="a.py", policy="float32"))
        'no findings'
    """
    counts = Counter(finding.severity for finding in report.findings)
    told = [_count(counts[each], each) for each in SEVERITIES if counts[each]]
    return ", ".join(told) or "no findings"


def fault_line(fault: Fault) -> str:
    """Returns what a fault is, in a line.

    Example:
        >>> fault = Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0)
        >>> fault_line(fault)
        'head: exp made inf in the forward pass, in float16, which ends at 65504'
    """
    words: dict[str, Any] = {
        name: visible(getattr(fault, name)) for name in ("module", "operation", "kind")
    }
    return visible(str(replace(fault, **words)).partition("\n")[0])


def _span(name: str, values: list[float]) -> str:
    if not values:
        return ""
    first, last = number(values[0]), number(values[-1])
    return f"{name} {first}" if first == last else f"{name} {first} to {last}"


def _count(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or f'{one}s'}"
