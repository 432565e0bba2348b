"""A report in a terminal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from halfstep.core import Cast, Diagnosis, Finding, Range, Report
from halfstep.report._numbers import bytes_text, number
from halfstep.report._shares import share_text
from halfstep.report._sparkline import sparkline
from halfstep.report._visible import visible
from halfstep.report._words import fault_line, headline, outcome

_CURVE_WIDTH = 32
_SHOWN = 8
_WORTH_TELLING = 1e-3
_SHOWN_LINES = 8
_OUTERMOST = "(outermost)"
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
        yield from _head(self.report, ascii_only=options.ascii_only)
        if self.report.findings or not self.report.error:
            yield Text(f"\n{outcome(self.report)}")
        for finding in self.report.findings:
            yield from _finding(finding)
        for part in (_failure, _faults, _losing, _casts):
            yield from part(self.report)


def _head(report: Report, *, ascii_only: bool) -> Iterator[RenderableType]:
    yield Text.assemble((visible(report.script), "bold"), f": {headline(report)}")
    losses = [step.loss for step in report.steps if step.loss is not None]
    if len(losses) > 1:
        curve = sparkline(losses, width=_CURVE_WIDTH, ascii_only=ascii_only)
        yield Text(f"  loss {curve}")
    versions = (f"{name} {version}" for name, version in report.versions)
    known = filter(None, [report.policy, report.device, ", ".join(versions)])
    yield Text(f"  {visible('; '.join(known))}", style="dim")


def _finding(finding: Finding) -> Iterator[RenderableType]:
    text = visible(": ".join(filter(None, [finding.module, finding.text])))
    yield Text.assemble((finding.severity, _STYLES[finding.severity]), f": {text}")
    if finding.remedy:
        yield _pasted(finding.remedy)


def _failure(report: Report) -> Iterator[RenderableType]:
    if report.error:
        yield Text("\nthe script failed:", style="bold red")
        yield _indented("\n".join(report.error.splitlines()[-_SHOWN_LINES:]))


def _faults(report: Report) -> Iterator[RenderableType]:
    if report.diagnosis:
        yield Text("\nfirst fault", style="bold")
        first, *others = _told_once(report).faults
        yield Text(visible(str(replace(first, remedy="")), lines=True))
        if first.remedy:
            yield _pasted(first.remedy)
        for other in others:
            yield Text(f"after it: {fault_line(other)}")
        if report.diagnosis.loss_scale is not None:
            yield Text(f"at loss scale {number(report.diagnosis.loss_scale)}")


def _told_once(report: Report) -> Diagnosis:
    """Returns the faults without those remedies that stand among the findings."""
    told = {finding.remedy for finding in report.findings}
    faults = report.diagnosis.faults
    return replace(
        report.diagnosis,
        faults=tuple(replace(it, remedy="") if it.remedy in told else it for it in faults),
    )


def _pasted(remedy: str) -> Text:
    text = _indented(f"write:\n{remedy}")
    text.no_wrap, text.overflow = True, "ignore"
    return text


def _indented(text: str) -> Text:
    return Text("\n".join(f"  {line}" for line in visible(text, lines=True).split("\n")))


def _losing(report: Report) -> Iterator[RenderableType]:
    """Yields the tensors that lose the most in the format that is computed in."""

    def loss(row: Range) -> tuple[int, float]:
        return row.run.infs + row.run.nans, report.lost(row)

    worth = [row for row in report.narrow.rows if loss(row) > (0, _WORTH_TELLING)]
    losing = sorted(worth, key=loss, reverse=True)
    if losing:
        yield _title(f"numbers that become 0 in {report.ranges.form}, or are not finite", losing)
        heads = ("module", "tensor", "become 0", "inf", "NaN", "largest")
        yield _table(heads, (_range_cells(report, row) for row in losing[:_SHOWN]))


def _range_cells(report: Report, row: Range) -> tuple[str, ...]:
    counts = (row.run.infs, row.run.nans, row.reference.largest)
    return (*_names(row.module, row.role), share_text(report.lost(row)), *map(number, counts))


def _casts(report: Report) -> Iterator[RenderableType]:
    if report.casts:
        ordered = sorted(report.casts, key=lambda cast: -cast.bytes)
        yield _title(f"casts in one step, {bytes_text(sum(it.bytes for it in ordered))}", ordered)
        heads = ("module", "operation", "from", "to", "casts", "bytes")
        yield _table(heads, map(_cast_cells, ordered[:_SHOWN]))


def _cast_cells(cast: Cast) -> tuple[str, ...]:
    names = _names(cast.module, cast.operation, cast.source, cast.target)
    return (*names, number(cast.count), bytes_text(cast.bytes))


def _names(module: str, *others: str) -> tuple[str, ...]:
    return tuple(map(visible, (module or _OUTERMOST, *others)))


def _title(text: str, rows: Sequence[object]) -> Text:
    hidden = len(rows) - _SHOWN
    return Text(f"\n{text}" + (f" ({_SHOWN} of {len(rows)})" if hidden > 0 else ""), style="bold")


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Table:
    # Text, not str: rich would read "[...]" in a name as markup.
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for head in heads:
        table.add_column(Text(head), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
