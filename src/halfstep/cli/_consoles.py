"""Where the command line writes: results to standard output, all else to standard error."""

import sys

from rich.console import Console


def output() -> Console:
    """Returns the console for results."""
    return Console(highlight=False)


def progress() -> Console:
    """Returns the console for progress, which is rewritten in place on a terminal only."""
    interactive = None if sys.stderr.isatty() else False
    return Console(stderr=True, highlight=False, force_interactive=interactive)
