"""In which module an operation runs: the dotted path below the outermost module of the region."""

import threading
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

from halfstep.torch import _private, _tracing

# Compiled modules warn that a global hook also fires for their wrapper, which is what we want.
_SPURIOUS = "Using `torch.compile\\(module\\)` when there are global hooks"


class _Local(threading.local):
    def __init__(self) -> None:
        self.users = 0
        self.stack: list[str] = []
        self.names: dict[int, str] = {}


class Paths:
    """Follows the calls of modules in the threads that ask for it.

    The path of a sub-module is its name in `named_modules()` of the outermost module called inside
    the region; the outermost module itself has the empty path.
    """

    def __init__(self) -> None:
        self._local = _Local()
        self._lock = threading.Lock()
        self._threads = 0
        self._hooks: list[Any] = []

    def current(self) -> str:
        """Returns the path of the module that is running, or an empty text."""
        local = self._local
        here = local.stack[-1] if local.stack else ""
        return ".".join(part for part in (here, _tracing.module_path()) if part)

    def start(self) -> None:
        """Follows this thread until `stop` is called as often."""
        self._local.users += 1
        if self._local.users > 1:
            return
        with self._lock:
            self._threads += 1
            if not self._hooks:
                warnings.filterwarnings("ignore", message=_SPURIOUS)
                self._hooks = [
                    _module.register_module_forward_pre_hook(self._enter),
                    _module.register_module_forward_hook(self._leave, always_call=True),
                ]

    def stop(self) -> None:
        """Ends one `start`."""
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

    def _enter(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not self._local.users:
            return
        local = self._local
        if not local.stack:
            local.names = {
                id(child): name.replace("_orig_mod.", "").removesuffix("_orig_mod").rstrip(".")
                for name, child in module.named_modules()
            }
        local.stack.append(local.names.get(id(module), type(module).__name__))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_dynamo_compiling() or not self._local.users:
            return
        if self._local.stack:
            self._local.stack.pop()


for _hook in (Paths._enter, Paths._leave):
    _private.never_compile(_hook)

PATHS = Paths()
