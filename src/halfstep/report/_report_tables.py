"""The numbers of a report in a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from halfstep.core import FORWARD, Cast, Fault, Range, Report
from halfstep.report._columns import Column, ColumnTable
from halfstep.report._magnitudes import broken_text, largest_text, lost_text
from halfstep.report._numbers import ASCII_UNKNOWN, UNKNOWN, bytes_text, number
from halfstep.report._visible import visible
from halfstep.report._words import UNNAMED

_SHOWN = 8
_WORTH_TELLING = 1e-3
# The head of each column, whether it holds numbers, and how soon a narrow terminal lacks it.
_RANGES = (
    ("module", False, 0),
    ("tensor", False, 1),
    ("become 0", True, 3),
    ("inf", True, 2),
    ("NaN", True, 2),
    ("largest", True, 4),
)
_CASTS = (
    ("module", False, 0),
    ("operation", False, 2),
    ("from", False, 3),
    ("to", False, 4),
    ("casts", True, 5),
    ("bytes", True, 1),
)


def ranges_table(report: Report, *, ascii_only: bool = False) -> Iterator[RenderableType]:
    """Yields the tensor of the first fault, and those that lose the most.

    Args:
        report: Whose ranges they are.
        ascii_only: Whether to keep to characters that every terminal has.
    """
    told = report.diagnosis.first
    others = [row for row in _losing(report) if not _is_of(told, row)]
    cells = [_range_cells(report, row) for row in others]
    if told is not None:
        cells.insert(0, _fault_cells(report, told))
    if cells:
        yield _title(f"numbers that become 0 in {report.ranges.form}, or are not finite", cells)
        shown = [_plain(line) if ascii_only else line for line in cells[:_SHOWN]]
        yield _table(_RANGES, shown)


def casts_table(report: Report) -> Iterator[RenderableType]:
    """Yields the casts of the most bytes.

    Args:
        report: Whose casts they are.
    """
    if report.casts:
        ordered = sorted(report.casts, key=lambda cast: -cast.bytes)
        yield _title(f"casts in one step, {bytes_text(sum(it.bytes for it in ordered))}", ordered)
        yield _table(_CASTS, list(map(_cast_cells, ordered[:_SHOWN])))


def _is_of(fault: Fault | None, row: Range) -> bool:
    return fault is not None and (row.module, row.role) == (fault.module, fault.role)


def _losing(report: Report) -> list[Range]:
    def loss(row: Range) -> tuple[bool, int, float]:
        broken = row.run.infs + row.run.nans
        # What a forward pass has made comes first and in its order: all gradients are NaN then.
        if broken and row.role in FORWARD:
            return True, 0, 0.0
        return False, broken, report.lost(row)

    worth = [row for row in report.narrow.rows if loss(row) > (False, 0, _WORTH_TELLING)]
    return sorted(worth, key=loss, reverse=True)


def _range_cells(report: Report, row: Range) -> Sequence[str]:
    broken = (broken_text(count, row.run.total) for count in (row.run.infs, row.run.nans))
    texts = (lost_text(report, row), *broken, largest_text(row))
    return (*_names(row.module, row.role), *texts)


def _fault_cells(report: Report, fault: Fault) -> Sequence[str]:
    """Returns what is known of the tensor of a fault, which need not be counted.

    It may be no module's own, or the step be none of those whose numbers were counted.
    """
    rows = [row for row in report.ranges.rows if _is_of(fault, row)]
    lost, largest = ("most" if fault.kind == "underflow" else UNKNOWN), UNKNOWN
    counts = ("0", "0")
    if rows:
        *_, lost, inf, nan, largest = _range_cells(report, rows[0])
        counts = (inf, nan)
    kinds = zip(("inf", "nan"), counts, strict=True)
    broken = ["yes" if text == "0" and kind in fault.kind else text for kind, text in kinds]
    return (*_names(fault.module, fault.role), lost, *broken, largest)


def _cast_cells(cast: Cast) -> Sequence[str]:
    names = _names(cast.module, cast.operation, cast.source, cast.target)
    return (*names, number(cast.count), bytes_text(cast.bytes))


def _names(module: str, *others: str) -> tuple[str, ...]:
    return tuple(map(visible, (module or UNNAMED, *others)))


def _plain(line: Sequence[str]) -> Sequence[str]:
    return [ASCII_UNKNOWN if text == UNKNOWN else text for text in line]


def _title(text: str, rows: Sequence[object]) -> Text:
    hidden = len(rows) - _SHOWN
    return Text(f"\n{text}" + (f" ({_SHOWN} of {len(rows)})" if hidden > 0 else ""), style="bold")


def _table(heads: Sequence[tuple[str, bool, int]], rows: Sequence[Sequence[str]]) -> ColumnTable:
    columns = zip(*rows, strict=True)
    return ColumnTable(
        [
            Column(head, list(cells), is_number, rank)
            for (head, is_number, rank), cells in zip(heads, columns, strict=True)
        ]
    )
