"""Calls back once a module was imported, so that a script imports it when and if it wants to."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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
    """Finds one module as the other finders do, and puts a loader around its loader."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name, self._callback = name, callback

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (each.find_spec(name, path, target) for each in others)
        spec = next(filter(None, specs), None)
        if spec and spec.loader:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        # Not where it is found: many only ask whether a module is there.
        sys.meta_path.remove(self)
        self._callback()


class _Loader(Loader):
    """Loads as another loader does, and then calls back."""

    def __init__(self, loader: Loader, callback: Callable[[], None]) -> None:
        self._loader, self._callback = loader, callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None
        spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._callback()
