"""What a long job shows while it runs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from halfstep.report._numbers import seconds_text

_MARGIN = 4  # lines left to the output above the live rows, and to the prompt below
_MARKS = {"waiting": "·", "running": "▸", "done": "✓", "failed": "✗"}
_ASCII_MARKS = {"waiting": ".", "running": ">", "done": "+", "failed": "x"}


@dataclass
class _Line:
    name: str
    state: str = "waiting"
    text: str = ""
    started: float = 0.0
    stopped: float | None = None


@dataclass
class Progress:
    """One line per piece of work: rewritten in place on a terminal, else printed once.

    Args:
        console: Where it is shown.
        names: One name per piece of work, in the order in which they run.
        clock: What the time is, in seconds.

    Example:
        >>> with Progress(Console(width=60), ["float32"], clock=lambda: 0.0) as progress:
        ...     progress.start(0)
        ...     progress.finish(0, "3 steps", failed=False)
        float32: started
        float32: done in 0.0 s, 3 steps
    """

    console: Console
    names: Sequence[str]
    clock: Callable[[], float] = time.monotonic
    _lines: list[_Line] = field(init=False)
    _live: Live | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Makes a waiting line of each name."""
        self._lines = [_Line(name) for name in self.names]

    def __enter__(self) -> Self:
        """Starts to show the lines."""
        if self.console.is_interactive:
            self._live = Live(
                get_renderable=self._render,
                console=self.console,
                refresh_per_second=8,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves the last state on the screen and the terminal as it was."""
        if self._live:
            self._live.stop()

    def start(self, index: int) -> None:
        """Marks a line as running."""
        self._lines[index].state, self._lines[index].started = "running", self.clock()
        self._print_plain(f"{self._lines[index].name}: started")

    def update(self, index: int, text: str) -> None:
        """Changes the text of a running line."""
        self._lines[index].text = text

    def finish(self, index: int, text: str, *, failed: bool) -> None:
        """Marks a line as done or failed."""
        line = self._lines[index]
        line.state, line.text = "failed" if failed else "done", text
        line.stopped = self.clock()
        elapsed = seconds_text(line.stopped - line.started)
        joint = "after" if failed else "in"
        self._print_plain(f"{line.name}: {line.state} {joint} {elapsed}, {text}")

    def print(self, text: str) -> None:
        """Prints a line above the ones that are rewritten; its colours only on a terminal."""
        self.console.print(Text.from_ansi(text), soft_wrap=not self._live)

    def _print_plain(self, text: str) -> None:
        if not self._live:
            self.print(text)

    def _render(self) -> RenderableType:
        marks = _ASCII_MARKS if self.console.options.ascii_only else _MARKS
        table = Table.grid(padding=(0, 2))
        for line in self._visible():
            name = Text(f"{marks[line.state]} {line.name}")
            table.add_row(name, Text(line.text), Text(self._elapsed(line)))
        return table

    def _visible(self) -> Sequence[_Line]:
        room = max(1, self.console.height - _MARGIN)
        begun = sum(line.state != "waiting" for line in self._lines)
        return self._lines[max(0, begun - room) :][:room]

    def _elapsed(self, line: _Line) -> str:
        if line.state == "waiting":
            return ""
        return seconds_text((line.stopped or self.clock()) - line.started)
