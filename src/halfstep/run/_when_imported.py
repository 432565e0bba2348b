"""Calls back once a module was imported, so that a script imports it when and if it wants to."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, callback: Callable[[], None]) -> None:
    """Calls `callback` as soon as a module was imported, at once if it already was.

    Until then nothing of it is loaded: what a script sets in `os.environ` before its imports,
    such as the number of threads, still counts.

    Args:
        name: The module's full name.
        callback: Called in the thread that imports it, before the `import` statement ends.

    Example:
        >>> when_imported("sys", lambda: print("there"))
        there
    """
    if name in sys.modules:
        callback()
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(MetaPathFinder):
    """Waits for one module."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, self._callback)
        return spec


class _Loader(Loader):
    """Loads as another loader does, and then calls back."""

    def __init__(self, loader: Loader, callback: Callable[[], None]) -> None:
        self._loader, self._callback = loader, callback

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback()
