"""How a loss scale has found its range, and whether it has."""

import itertools
from collections.abc import Iterator

from halfstep.core import Finding, Report, Step, written
from halfstep.diagnose._heard import Evidence, Look
from halfstep.diagnose._writing import begun_with

_MANY_SKIPS = 0.1
_IN_A_ROW = 3
# A scale may be looked for by a few skips in as many steps.
_SEARCHED = 50
_TOO_HIGH = (
    "The first {count} steps were skipped: a loss scale of {first:g} is too high to begin with, "
    "and steps are taken at {scale:g}."
)


def is_stuck(report: Report) -> bool:
    """Returns whether steps go on to be skipped once a scale has been found, or none was found.

    Args:
        report: What is known of all steps.
    """
    last = report.steps[-_IN_A_ROW:]
    if len(last) == _IN_A_ROW and all(step.skipped for step in last):
        return True
    return _are_many(len(report.skipped) - len(_search(report)), report)


def searched_long(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    """Yields what there is to say of a scale that took many steps to come down."""
    report = evidence.report
    search = _search(report)
    if decisive is None and search and _are_many(len(search), report):
        taken = (step.scale for step in report.steps if step.scale and not step.skipped)
        scale = min(taken)
        text = _TOO_HIGH.format(count=len(search), first=search[0].scale, scale=scale)
        changes = begun_with(evidence, scale)
        yield Finding("warning", text, "", written(changes), changes)


def _search(report: Report) -> list[Step]:
    """Returns the skipped steps that a training begins with, if a lower scale then suits."""
    skipped = list(itertools.takewhile(lambda step: step.skipped, report.steps))
    if not skipped or len(skipped) == len(report.steps):
        return []
    first, taken = skipped[0].scale, report.steps[len(skipped)].scale
    return skipped if first and taken and taken < first else []


def _are_many(count: int, report: Report) -> bool:
    return count > _MANY_SKIPS * max(len(report.steps), _SEARCHED)
