"""Whether a function is being traced for a region at the moment."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from jax.experimental.xla_metadata import set_xla_metadata

from halfstep.jax._interpret import REGION, Note


class _Local(threading.local):
    depth = 0
    note: Note | None = None


_LOCAL = _Local()
_times = itertools.count()


def is_inside() -> bool:
    """Returns whether this thread traces what a region holds.

    Example:
        >>> is_inside()
        False
    """
    return _LOCAL.depth > 0


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Says that this thread traces what a region holds, until the block ends."""
    _LOCAL.depth += 1
    try:
        yield
    finally:
        _LOCAL.depth -= 1


def note() -> Note | None:
    """Returns who is told of the operations of regions, None for nobody."""
    return _LOCAL.note


@contextlib.contextmanager
def noting(note: Note) -> Iterator[None]:
    """Tells of each operation of a region that this thread traces, until the block ends."""
    _LOCAL.note = note
    try:
        yield
    finally:
        _LOCAL.note = None


def afresh() -> Any:
    """Returns a block in which JAX traces again what it has traced already."""
    return set_xla_metadata(halfstep=next(_times))


def named(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that the region around leaves alone, once it is compiled."""

    def region(*arrays: Any) -> Any:
        return function(*arrays)

    region.__name__ = REGION
    return region
