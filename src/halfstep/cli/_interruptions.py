"""What ends a long job before its end, and still lets it tell what it has found."""

import contextlib
import signal
from collections.abc import Iterator

INTERRUPTED = 130


@contextlib.contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """Lets a scheduler that ends the job still get what was found, and ends the run as well."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
