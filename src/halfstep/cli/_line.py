"""One line of progress about a script that runs."""

from halfstep.report import Progress


class Line:
    """Shows how a script goes in the first line of progress.

    Args:
        progress: The lines.
        verbose: Whether what the script prints is shown, too.
    """

    def __init__(self, progress: Progress, *, verbose: bool) -> None:
        self._progress, self._verbose = progress, verbose

    def update(self, text: str) -> None:
        """Shows how far the script is."""
        self._progress.update(0, text)

    def output(self, line: str) -> None:
        """Shows what the script printed."""
        if self._verbose:
            self._progress.print(line)
