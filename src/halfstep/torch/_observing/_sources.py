"""In which line an autocast was made, where that is known."""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from halfstep.torch._observing._places import line

_NAME = "_halfstep_source"


class _Local(threading.local):
    source = ""


_local = _Local()


def here() -> str:
    """Returns the innermost line outside of PyTorch and halfstep, as "file:line"."""
    return os.path.basename(line(()).partition(" (")[0])


def marked(made: Any, source: str) -> Any:
    """Returns an autocast, which from now on tells the line that it was made in."""
    setattr(made, _NAME, source)
    return made


def source_of(made: Any) -> str:
    """Returns the line that an autocast was made in, "" where it is not known.

    Example:
        >>> import torch
        >>> source_of(marked(torch.autocast("cpu"), "train.py:7"))
        'train.py:7'
    """
    return str(getattr(made, _NAME, ""))


def entering() -> str:
    """Returns the line of the autocast that this thread enters, "" where it is not known."""
    return _local.source


@contextlib.contextmanager
def entered(source: str) -> Iterator[None]:
    """Lets an autocast that is entered in the block be the one of a line."""
    before, _local.source = _local.source, source
    try:
        yield
    finally:
        _local.source = before
