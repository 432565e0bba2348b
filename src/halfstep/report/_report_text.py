"""A report in a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.text import Text

from halfstep.core import LATER, Finding, Report
from halfstep.report._numbers import number
from halfstep.report._report_tables import casts_table, ranges_table
from halfstep.report._sparkline import sparkline
from halfstep.report._visible import visible
from halfstep.report._words import (
    fault_line,
    headline,
    is_repeated,
    outcome,
    part_text,
    telling,
)

_CURVE_WIDTH = 32
_SHOWN_LINES = 8
_SHOWN_FAULTS = 5
_STYLES = {"error": "bold red", "warning": "yellow", "note": "bold"}


@dataclass(frozen=True)
class ReportText:
    """A report as text that fits the terminal: what there is to do first, then the numbers.

    What is to be pasted stays in its lines, however long: print it with `crop=False`.

    Args:
        report: What happened.

    Example:
        >>> from rich.console import Console
        >>> report = Report(script="train.py", policy="float32")
        >>> Console(width=60).print(ReportText(report), crop=False)
        train.py: 0 steps, none skipped
          float32
        <BLANKLINE>
        no findings
    """

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields its parts."""
        report = self.report
        yield from _head(report, ascii_only=options.ascii_only)
        if report.diagnosis and telling(report) is None:
            yield Text("\nfirst fault", style="bold")
            yield Text(fault_line(report.diagnosis.faults[0]))
            yield from _fault(report)
            yield from _pasted(report.diagnosis.faults[0].remedy, part_text(report))
        if report.findings or not (report.error or report.diagnosis):
            yield Text(f"\n{outcome(report)}", style="bold")
        for finding in report.findings:
            yield from _finding(finding, report)
        yield from _whole(report)
        yield from _failure(report)
        yield from ranges_table(report, ascii_only=options.ascii_only)
        yield from casts_table(report)


def _head(report: Report, *, ascii_only: bool) -> Iterator[RenderableType]:
    yield Text.assemble((visible(report.script), "bold"), f": {headline(report)}")
    losses = [step.loss for step in report.steps if step.loss is not None]
    if len(losses) > 1:
        curve = sparkline(losses, width=_CURVE_WIDTH, ascii_only=ascii_only)
        yield Text(f"  loss {curve}")
    versions = (f"{name} {version}" for name, version in report.versions)
    known = filter(None, [report.policy, report.device, ", ".join(versions)])
    yield Text(f"  {visible('; '.join(known))}", style="dim")


def _finding(finding: Finding, report: Report) -> Iterator[RenderableType]:
    text = visible(": ".join(filter(None, [finding.module, finding.text])))
    yield Text.assemble((finding.severity, _STYLES[finding.severity]), f": {text}")
    if finding is telling(report):
        yield from _fault(report)
    if is_repeated(finding, report):
        yield Text("  write: as above")
    else:
        yield from _pasted(finding.remedy, part_text(report))


def _whole(report: Report) -> Iterator[RenderableType]:
    """Yields all remedies as one, where there are several."""
    if report.is_manifold:
        yield Text("\nwhat to write", style="bold")
        yield from _pasted(report.remedies.text, "all in one:")
        for each in report.remedies.later:
            yield _indented(f"{LATER}{each}")


def _failure(report: Report) -> Iterator[RenderableType]:
    if report.error:
        yield Text("\nthe script failed:", style="bold red")
        yield _indented("\n".join(report.error.splitlines()[-_SHOWN_LINES:]))


def _fault(report: Report) -> Iterator[RenderableType]:
    """Yields what there is to know of the first fault, besides its headline and its remedy."""
    first, *others = report.diagnosis.faults
    _, _, details = str(replace(first, remedy="")).partition("\n")
    lines = [line.removeprefix("  ") for line in details.splitlines()]
    if report.diagnosis.loss_scale is not None:
        lines.append(f"at loss scale {number(report.diagnosis.loss_scale)}")
    lines += [f"after it: {fault_line(other)}" for other in others[:_SHOWN_FAULTS]]
    if others[_SHOWN_FAULTS:]:
        lines.append(f"and {len(others) - _SHOWN_FAULTS} more")
    for line in lines:
        yield Padding(Text(visible(line)), (0, 0, 0, 2), expand=False)


def _pasted(remedy: str, label: str) -> Iterator[RenderableType]:
    if remedy:
        text = _indented(f"{label}\n{remedy}")
        text.no_wrap, text.overflow = True, "ignore"
        yield text


def _indented(text: str) -> Text:
    return Text("\n".join(f"  {line}" for line in visible(text, lines=True).split("\n")))
