"""Which calls of modules are made within another one, in whatever thread."""

import contextlib
import threading
from collections.abc import Iterator

from torch import nn


class _Depth(threading.local):
    value = 0


class Within:
    """Knows of the calls that are under way.

    A model may hand its parts to threads, as `DataParallel` does with copies of itself: their calls
    are no calls of models of their own.

    Example:
        >>> within, model = Within(), nn.Sequential(nn.Linear(2, 2))
        >>> with within.call(model):
        ...     within.holds(model[0])
        True
        >>> within.holds(model[0])
        False
    """

    def __init__(self) -> None:
        self._depth = _Depth()
        self._under_way: list[nn.Module] = []

    @contextlib.contextmanager
    def call(self, model: nn.Module | None = None) -> Iterator[None]:
        """Lets all that this thread calls be within, until the block ends.

        Args:
            model: Whose modules are within in other threads, too; None for no such model.
        """
        under_way = [] if model is None else [model]
        self._depth.value += 1
        self._under_way += under_way
        try:
            yield
        finally:
            self._depth.value -= 1
            for each in under_way:
                self._under_way.remove(each)

    @property
    def here(self) -> bool:
        """Whether this thread is within a call."""
        return self._depth.value > 0

    def holds(self, module: nn.Module) -> bool:
        """Returns whether a call of a module would be within another one.

        Args:
            module: The module.
        """
        if self.here or getattr(module, "_is_replica", False):
            return True
        under_way = tuple(self._under_way)  # that another thread may change meanwhile
        return any(each is module for model in under_way for each in model.modules())
