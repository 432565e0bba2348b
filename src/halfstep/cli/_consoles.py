"""Where the command line writes: results to standard output, all else to standard error."""

import sys

from rich.console import Console


def output(*, to_stderr: bool = False) -> Console:
    """Returns the console for results.

    Args:
        to_stderr: Whether standard output is taken by something else.
    """
    return Console(stderr=to_stderr, highlight=False)


def progress() -> Console:
    """Returns the console for progress, which is rewritten in place on a terminal only."""
    interactive = None if sys.stderr.isatty() else False
    return Console(stderr=True, highlight=False, force_interactive=interactive)


def messages() -> Console:
    """Returns the console for what is said beside the results of somebody else."""
    return output(to_stderr=True)
