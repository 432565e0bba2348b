"""Changes of PyTorch that last while somebody wants them, and leave no trace afterwards."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from halfstep import core
from halfstep.torch._private import never_compile

Undo = Callable[[], None]


def replace(owner: Any, name: str, around: Callable[..., Any]) -> Undo:
    """Does what `halfstep.core.replace` does, with functions that no compiler looks into.

    Example:
        >>> from types import SimpleNamespace
        >>> owner = SimpleNamespace(double=lambda x: 2 * x)
        >>> undo = replace(owner, "double", lambda original, x: original(x) + 1)
        >>> owner.double(3)
        7
    """
    return core.replace(owner, name, around, functools.partial(never_compile, callees=True))


def before(do: Callable[[Any], None]) -> Callable[..., Any]:
    """Returns what does something with an object before a method of it runs."""

    def around(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            do(self)
        return original(self, *args, **kwargs)

    return around


def after(do: Callable[[Any], None]) -> Callable[..., Any]:
    """Returns what does something with an object after a method of it ran."""

    def around(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        do(self)
        return result

    return around


class Shared:
    """Something that is switched on once, however many want it, and off with the last of them.

    Args:
        install: Yields, for each change that it makes, what undoes it.

    Example:
        >>> shared = Shared(lambda: iter([lambda: print("off")]))
        >>> first, second = shared.open(), shared.open()
        >>> first()
        >>> first()
        >>> second()
        off
    """

    def __init__(self, install: Callable[[], Iterator[Undo]]) -> None:
        self._install = install
        self._lock = threading.Lock()
        self._wanted: set[object] = set()
        self._undo: list[Undo] = []

    def open(self) -> Undo:
        """Switches it on and returns what says that it is no longer wanted."""
        token = object()
        with self._lock:
            if not self._wanted:
                self._undo = list(self._install())
            self._wanted.add(token)
        return lambda: self._close(token)

    def _close(self, token: object) -> None:
        with self._lock:
            if token not in self._wanted:
                return
            self._wanted.remove(token)
            while not self._wanted and self._undo:
                self._undo.pop()()
