"""A table that stays readable in a narrow terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from halfstep.report._numbers import ASCII_UNKNOWN, UNKNOWN

_UNBOUNDED = 10_000
_WIDEST_COLUMN = 22

_Grid = list[list[str]]


@dataclass(frozen=True)
class Row:
    """What is known about one thing that is compared.

    Args:
        name: What the row is about.
        cells: Text by column name. Rows need not have the same columns.
    """

    name: str
    cells: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FittingTable:
    """Rows side by side, in the widest of three layouts that the terminal has room for.

    A line per row; else a column per row; else the first row beside each other one in turn.

    Args:
        corner: What the rows are, as the head of their names.
        rows: The rows, the one that the others are compared with first.

    Example:
        >>> from rich.console import Console
        >>> table = FittingTable("policy", (Row("a", {"loss": "1"}), Row("b", {"loss": "2"})))
        >>> Console(width=40).print(table)  # doctest: +NORMALIZE_WHITESPACE
        policy   loss
        ─────────────
        a        1
        b        2
    """

    corner: str
    rows: Sequence[Row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the layout that fits."""
        unknown = ASCII_UNKNOWN if options.ascii_only else UNKNOWN
        lines = [[row.name, *_known(row, _labels(self.rows), unknown)] for row in self.rows]
        grid = [[self.corner, *_labels(self.rows)], *lines]
        for cells in (grid, _turned(grid)):
            table = _table(cells)
            if _natural_width(console, options, table) <= options.max_width:
                yield table
                return
        head, first, *others = grid
        pairs = [[head, first, other] for other in others] or [[head, first]]
        yield Group(*(Group("", _table(_turned(pair))) for pair in pairs))


def _known(row: Row, labels: Sequence[str], unknown: str) -> list[str]:
    return [row.cells.get(label) or unknown for label in labels]


def _labels(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(row.cells for row in rows)))


def _turned(grid: _Grid) -> _Grid:
    return [list(column) for column in zip(*grid, strict=True)]


def _table(grid: _Grid) -> Table:
    # Text, not str: rich would read "[...]" in a name as markup.
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    heads, *lines = ([Text(cell) for cell in line] for line in grid)
    for head in heads:
        table.add_column(head, overflow="fold", max_width=_WIDEST_COLUMN)
    for line in lines:
        table.add_row(*line)
    return table


def _natural_width(console: Console, options: ConsoleOptions, table: Table) -> int:
    return console.measure(table, options=options.update(width=_UNBOUNDED)).maximum
