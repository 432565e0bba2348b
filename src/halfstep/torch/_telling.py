"""Who tells about an optimizer step: what made it, or else whoever watches the optimizer."""

import threading
from types import TracebackType


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class telling:
    """Says that this thread, within the block, tells about the optimizer steps it makes.

    Example:
        >>> with telling():
        ...     is_telling()
        True
        >>> is_telling()
        False
    """

    def __enter__(self) -> None:
        _depth.value += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _depth.value -= 1


def is_telling() -> bool:
    """Returns whether this thread makes an optimizer step that it tells about itself."""
    return _depth.value > 0
