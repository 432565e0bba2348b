"""Gradients that come back to outputs on JAX, where what takes them runs a second time."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from halfstep.keras._diagnosing._on_jax import probe
from halfstep.keras._patches import Undo
from halfstep.keras._returned import Returned, local, replaced


def install() -> Iterator[Undo]:
    """Yields nothing: what takes gradients is replaced where it is run again."""
    yield from ()


def watched(outputs: Any, returned: Returned) -> Any:
    """Returns the outputs, and keeps what will be told in the second run."""
    if local.order is not None:
        local.order.append(returned)
    return outputs


@contextlib.contextmanager
def following() -> Iterator[None]:
    """Keeps the order of what is called until the block ends."""
    local.order = []
    try:
        yield
    finally:
        local.order = None


def probed(outputs: Any) -> Any:
    """Returns the outputs of the next call, whose gradients are handed on when they arrive."""
    if not local.order:
        return outputs
    returned = local.order.pop(0)
    return replaced(outputs, functools.partial(_probed, returned))


def _probed(returned: Returned, place: int, value: Any) -> Any:
    return probe(value, functools.partial(returned.take, place))
