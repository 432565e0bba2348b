import io

import pytest
from rich.console import Console

from halfstep.report import Progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def shown(interactive, height=10):
    console = Console(
        file=io.StringIO(),
        force_terminal=interactive,
        width=60,
        height=height,
        legacy_windows=False,
    )
    clock = Clock()
    with Progress(console, ["a", "b", "c", "d"], clock) as progress:
        progress.start(0)
        progress.update(0, "7 steps")
        clock.now = 65.0
        progress.finish(0, "9 steps", failed=False)
        progress.start(1)
        progress.print("printed by the script")
        clock.now = 66.5
        progress.finish(1, "ValueError: no", failed=True)
    return console.file.getvalue()


def test_plain_lines_without_a_terminal():
    assert shown(interactive=False).splitlines() == [
        "a: started",
        "a: done in 1:05, 9 steps",
        "b: started",
        "printed by the script",
        "b: failed after 1.5 s, ValueError: no",
    ]


def test_rewritten_lines_on_a_terminal():
    text = shown(interactive=True)
    for piece in ("✓ a", "9 steps", "1:05", "✗ b", "ValueError: no", "· c", "printed by"):
        assert piece in text


def test_the_cursor_comes_back():
    text = shown(interactive=True)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_cursor_comes_back_after_an_interruption():
    console = Console(file=io.StringIO(), force_terminal=True, legacy_windows=False)
    with pytest.raises(KeyboardInterrupt), Progress(console, ["a"]):
        raise KeyboardInterrupt
    assert console.file.getvalue().rstrip().endswith("\x1b[?25h")


def test_a_small_terminal_shows_the_latest_lines():
    last = shown(interactive=True, height=6).rpartition("✓ a")[2]
    assert "✗ b" in last
    assert "· d" not in last
