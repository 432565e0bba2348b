"""A table whose numbers stay whole: in a narrow terminal, columns are left out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.table import Table
from rich.text import Text

_UNBOUNDED = 10_000
_NARROWEST_NAME = 12


@dataclass(frozen=True)
class Column:
    """What stands below each other.

    Args:
        head: What it is.
        cells: A text for each row.
        is_number: Whether it is to stay in one piece; a name is broken where there is no room.
        rank: How soon it is left out: the highest first, 0 never.
    """

    head: str
    cells: Sequence[str]
    is_number: bool = False
    rank: int = 0

    @property
    def widest(self) -> int:
        """The width that it would like to have."""
        return max(map(cell_len, (self.head, *self.cells)))

    @property
    def narrowest(self) -> int:
        """The width that it needs."""
        return self.widest if self.is_number else min(self.widest, _NARROWEST_NAME)


@dataclass(frozen=True)
class ColumnTable:
    """As many of some columns as there is room for, and below them what was left out.

    Args:
        columns: All of them, from left to right.

    Example:
        >>> from rich.console import Console
        >>> module, largest = Column("module", ["head"]), Column("largest", ["65504"], True, 1)
        >>> Console(width=12).print(ColumnTable((module, largest)))
        module
        ──────
        head
        no room for:
        largest
    """

    columns: Sequence[Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table, and what it lacks."""
        shown = _fitting(self.columns, console, options)
        yield _table(shown)
        left_out = [each.head for each in self.columns if each not in shown]
        if left_out:
            yield Text(f"no room for: {', '.join(left_out)}", style="dim")


def _fitting(
    columns: Sequence[Column], console: Console, options: ConsoleOptions
) -> Sequence[Column]:
    while _needed(columns, console, options) > options.max_width:
        worst = max(columns, key=lambda each: each.rank)
        if not worst.rank:
            break
        columns = [each for each in columns if each is not worst]
    return columns


def _needed(columns: Sequence[Column], console: Console, options: ConsoleOptions) -> int:
    """Returns the width with the names broken as far as they may be."""
    unbounded = options.update(width=_UNBOUNDED)
    whole = console.measure(_table(columns), options=unbounded).maximum
    return whole - sum(each.widest - each.narrowest for each in columns)


def _table(columns: Iterable[Column]) -> Table:
    # Text, not str: rich would read "[...]" in a name as markup.
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for each in columns:
        justify: JustifyMethod = "right" if each.is_number else "left"
        table.add_column(Text(each.head), overflow="fold", no_wrap=each.is_number, justify=justify)
    for row in zip(*(each.cells for each in columns), strict=True):
        table.add_row(*map(Text, row))
    return table
