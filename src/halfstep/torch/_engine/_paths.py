"""In which module an operation runs: the dotted path below the outermost module of the region."""

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from halfstep.core import UnmatchedRuleWarning, unmatched
from halfstep.torch import _private, _tracing

# Compiled modules warn that a global hook also fires for their wrapper, which is what we want.
HOOKS_ARE_GLOBAL = "Using `torch.compile\\(module\\)` when there are global hooks"


# Wrappers around a model, which leave its paths as they are without them.
_TRANSPARENT = ("module", "_orig_mod")

# What a region holds its module by.
_REGION = "_module"

Position = tuple[tuple[str, ...], dict[int, str]]


class _Local(threading.local):
    def __init__(self) -> None:
        self.users = 0
        self.root: nn.Module | None = None
        self.stack: list[str] = []
        self.names: dict[int, str] = {}
        self.seen: set[str] = set()
        self.warned: set[tuple[str, ...]] = set()


class Paths:
    """Follows the calls of modules in the threads that ask for it.

    The path of a sub-module is its name in `named_modules()` of the outermost module called inside
    the region, or of the module that is the region; that module itself has the empty path. Wrappers
    such as DDP do not count.
    """

    def __init__(self) -> None:
        self._local = _Local()
        self._lock = threading.Lock()
        self._threads = 0
        self._hooks: list[Any] = []

    def current(self) -> str:
        """Returns the path of the module that is running, or an empty text."""
        local = self._local
        traced = _tracing.traced_modules()
        if not local.stack:
            return _below_root(traced) if traced else ""
        here = local.stack[-1]
        return _below(here, traced[-1], set(local.names.values())) if traced else here

    def position(self) -> Position:
        """Returns where this thread is, to be resumed later."""
        return tuple(self._local.stack), self._local.names

    @contextlib.contextmanager
    def at(self, position: Position) -> Iterator[None]:
        """Puts this thread where a position was taken, until the block ends."""
        local, before = self._local, self.position()
        local.stack[:], local.names = position
        try:
            yield
        finally:
            local.stack[:], local.names = before

    @contextlib.contextmanager
    def rooted(self, module: nn.Module) -> Iterator[None]:
        """Lets a thread that is followed from inside of a module start there."""
        local, before = self._local, self._local.root
        local.root = module
        try:
            yield
        finally:
            local.root = before

    def start(self) -> None:
        """Follows this thread until `stop` is called as often."""
        local = self._local
        local.users += 1
        if local.users > 1:
            return
        if local.root is not None:
            self._begin(local.root)
            local.stack.append("")
        with self._lock:
            self._threads += 1
            if not self._hooks:
                warnings.filterwarnings("ignore", message=HOOKS_ARE_GLOBAL)
                self._hooks = [
                    _module.register_module_forward_pre_hook(self._enter),
                    _module.register_module_forward_hook(self._leave, always_call=True),
                ]

    def stop(self, patterns: tuple[str, ...]) -> None:
        """Ends one `start`, and warns of patterns that matched no module that ran since."""
        self._local.users -= 1
        if self._local.users:
            return
        self._local.stack.clear()
        with self._lock:
            self._threads -= 1
            if not self._threads:
                for hook in self._hooks:
                    hook.remove()
                self._hooks = []
        self._warn(patterns)

    def _warn(self, patterns: tuple[str, ...]) -> None:
        seen, self._local.seen = self._local.seen, set()
        if not seen - {""} or patterns in self._local.warned:
            return
        for text in unmatched(patterns, seen):
            self._local.warned.add(patterns)
            warnings.warn(UnmatchedRuleWarning(text), stacklevel=5)

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not self._local.users:
            return
        local = self._local
        if not local.stack:
            self._begin(module)
        wrapper = local.stack[-1] if local.stack else ""
        local.stack.append(local.names.get(id(module), wrapper))

    def _begin(self, module: nn.Module) -> None:
        local = self._local
        local.names = {
            id(child): ".".join(part for part in name.split(".") if part != "_orig_mod")
            for name, child in _unwrapped(module).named_modules()
        }
        local.seen.update(local.names.values())

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not self._local.users:
            return
        if self._local.stack:
            self._local.stack.pop()


def _below_root(traced: list[str]) -> str:
    """Returns the path of the innermost module of a graph below the outermost one.

    Example:
        >>> _below_root(["model", "model.head"]), _below_root(["_module.0", "_module.0.head"])
        ('head', '0.head')
    """
    # A region calls the forward of its module, which therefore is not among those of the graph.
    root = _REGION if traced[0].startswith(f"{_REGION}.") else traced[0]
    return traced[-1].removeprefix(root).removeprefix(".")


def _below(here: str, traced: str, names: set[str]) -> str:
    """Returns the path of a module in a graph that was called from the module `here`.

    A graph names modules by the variables that hold them, so only the end of a name is sure.

    Example:
        >>> _below("encoder", "self.0.head", {"encoder", "encoder.head"})
        'encoder.head'
    """
    parts = traced.split(".")
    for start in range(len(parts)):
        path = ".".join(part for part in (here, *parts[start:]) if part)
        if path in names:
            return path
    return here


def _unwrapped(module: nn.Module) -> nn.Module:
    """Returns the model inside of wrappers such as DDP, AveragedModel or a compiled module."""
    children = dict(module.named_children())
    while len(children) == 1 and next(iter(children)) in _TRANSPARENT:
        (module,) = children.values()
        children = dict(module.named_children())
    return module


for _hook in (Paths._enter, Paths._leave):
    _private.never_compile(_hook)

PATHS = Paths()
