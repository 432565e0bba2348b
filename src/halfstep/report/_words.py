"""What a report comes to, in a line or two."""

import math
import re
from collections import Counter
from dataclasses import replace
from typing import Any

from halfstep.core import SEVERITIES, Fault, Finding, Format, Report
from halfstep.report._numbers import number
from halfstep.report._visible import visible

# A module whose path is empty.
UNNAMED = "(the model)"


def headline(report: Report) -> str:
    """Returns how the training went, in a line.

    Example:
        >>> from halfstep.core import Step
        >>> steps = (Step(1, 2.0, 8.0), Step(2, 1.0, 4.0, skipped=True))
        >>> headline(Report(script="a.py", policy="mixed_float16", steps=steps))
        '2 steps, 1 skipped; loss 2 to 1; scale 8 to 4'
    """
    losses, scales = _curves(report)
    counted = f"{_count(len(report.steps), 'step')}, {len(report.skipped) or 'none'} skipped"
    spans = {"loss": _span(losses, " to "), "scale": _span(scales, " to ")}
    pieces = [counted, *(f"{name} {text}" for name, text in spans.items() if text)]
    broken = sum(not math.isfinite(loss) for loss in losses)
    if broken:
        pieces.append(f"{_count(broken, 'loss', 'losses')} not finite")
    if report.stopped:
        pieces.append("stopped before its end")
    return "; ".join(pieces)


def figures(report: Report) -> dict[str, str]:
    """Returns how the training went, as a few texts by name.

    Example:
        >>> from halfstep.core import Step
        >>> steps = (Step(1, 2.0, 8.0), Step(2, 1.0, 4.0, skipped=True))
        >>> figures(Report(script="a.py", policy="mixed_float16", steps=steps))
        {'Steps': '2', 'Skipped': '1', 'Loss': '2 → 1', 'Loss scale': '8 → 4'}
    """
    losses, scales = _curves(report)
    broken = sum(not math.isfinite(loss) for loss in losses)
    found = {
        "Steps": number(len(report.steps)),
        "Skipped": number(len(report.skipped)),
        "Loss": _span(losses, " → ").replace("nan", "NaN"),
        "Losses not finite": number(broken) if broken else "",
        "Loss scale": _span(scales, " → "),
    }
    return {name: text for name, text in found.items() if text}


def outcome(report: Report) -> str:
    """Returns how many findings of which severity there are, in a line.

    Example:
        >>> outcome(Report(script="a.py", policy="float32"))
        'no findings'
    """
    counts = Counter(finding.severity for finding in report.findings)
    told = [_count(counts[each], each) for each in SEVERITIES if counts[each]]
    return ", ".join(told) or "no findings"


def telling(report: Report) -> Finding | None:
    """Returns the finding that tells of the first fault, None where none does.

    Example:
        >>> from halfstep.core import Diagnosis
        >>> fault = Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0)
        >>> found = Finding("error", "Exp made inf.", "head")
        >>> report = Report(
        ...     script="a.py", policy="float16", diagnosis=Diagnosis((fault,)), findings=(found,)
        ... )
        >>> telling(report) is found
        True
    """
    fault = report.diagnosis.first
    told = () if fault is None else (fault.module, fault.remedy)
    return next((each for each in report.findings if (each.module, each.remedy) == told), None)


def is_repeated(finding: Finding, report: Report) -> bool:
    """Returns whether a finding has the remedy of one that is told before it.

    Example:
        >>> one, two = (Finding("warning", "It is lost.", name, "x = 1") for name in "ab")
        >>> report = Report(script="a.py", policy="float16", findings=(one, two))
        >>> is_repeated(one, report), is_repeated(two, report)
        (False, True)
    """
    fault = report.diagnosis.first
    if fault is not None and telling(report) is None and fault.remedy == finding.remedy:
        return bool(finding.remedy)
    first = next(each for each in report.findings if each.remedy == finding.remedy)
    return bool(finding.remedy) and first is not finding


def part_text(report: Report) -> str:
    """Returns what stands above a remedy: it may be a part of what is to be written.

    Example:
        >>> part_text(Report(script="a.py", policy="float16"))
        'write:'
    """
    return "its part:" if report.is_manifold else "write:"


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


def date_text(date: str) -> str:
    """Returns a date in UTC as a person writes it, and any other text as it is.

    Example:
        >>> date_text("2026-11-30T14:05:09+00:00"), date_text("today")
        ('2026-11-30 14:05 UTC', 'today')
    """
    found = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)(:\d\d)?\+00:00", date)
    return f"{found[1]} {found[2]} UTC" if found else visible(date)


def end_text(fault: Fault) -> str:
    """Returns which end of its format a fault has met.

    Example:
        >>> end_text(Fault("head", "exp", "forward", "output", "inf", "float16", (2,), 12.0))
        'ends at 65504'
    """
    if fault.kind == "underflow":
        return f"begins at {number(Format.named(fault.dtype).smallest_subnormal, 2)}"
    return f"ends at {number(fault.limit)}"


def _curves(report: Report) -> tuple[list[float], list[float]]:
    losses = [step.loss for step in report.steps if step.loss is not None]
    return losses, [step.scale for step in report.steps if step.scale is not None]


def _span(values: list[float], joint: str) -> str:
    """Returns the first and the last value, or one where they are the same, "" without any."""
    ends = [number(value) for value in (*values[:1], *values[-1:])]
    return joint.join(dict.fromkeys(ends))


def _count(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or f'{one}s'}"
