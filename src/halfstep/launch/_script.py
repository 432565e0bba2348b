"""Runs a script or a module as plain Python would: `python SCRIPT` or `python -m MODULE`."""

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from halfstep.errors import UsageError

_HALFSTEP = str(Path(__file__).parents[1])
_NOT_THE_SCRIPT = (_HALFSTEP, os.path.dirname(importlib.util.__file__), "<frozen ")


@dataclass(frozen=True)
class Script:
    """What is run.

    Args:
        name: The path of a Python file as the user wrote it, or the name of a module.
        args: What follows it in `sys.argv`.
        module: Whether `name` is a module's.
    """

    name: str
    args: tuple[str, ...] = ()
    module: bool = False

    @property
    def folder(self) -> str:
        """What plain Python puts first on `sys.path`."""
        return os.getcwd() if self.module else os.path.dirname(os.path.realpath(self.name))

    def check(self, command: str) -> None:
        """Refuses a path that is not a file's; a module is looked for where it is run.

        Args:
            command: Who says so.
        """
        if not self.module:
            _check_file(self.name, command)

    def load(self) -> "Program":
        """Finds it, which for a module runs the packages around it."""
        sys.argv = ["-m" if self.module else self.name, *self.args]
        with _without_callers(besides=UsageError):
            program = (_find_module if self.module else _find_file)(self.name)
        if self.module:
            sys.argv[0] = program.names["__file__"]
        return program


@dataclass(frozen=True)
class Program:
    """A script that was found.

    Args:
        code: What is executed.
        names: What its module says about itself.
    """

    code: CodeType
    names: dict[str, Any]

    def run(self) -> None:
        """Runs it as `__main__`, in this process; to be called once.

        Not by `runpy`: it takes `__main__` away again when the file ends, before the threads and
        exit handlers of the script have run.
        """
        module = ModuleType("__main__")
        module.__dict__.update(self.names, __builtins__=sys.modules["builtins"])
        sys.modules["__main__"] = module
        with _without_callers(besides=SystemExit):
            exec(self.code, module.__dict__)


def first_on_path(folder: str) -> None:
    """Puts a folder where the one of this program is, as plain Python would for the script."""
    if not sys.flags.safe_path:
        sys.path[:1] = [folder]


def _find_file(name: str) -> Program:
    path = os.path.abspath(name)
    loader = SourceFileLoader("__main__", path)
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    return Program(code, {"__file__": path, "__loader__": loader, "__cached__": None})


def _find_module(name: str) -> Program:
    spec = None if name.startswith(".") else _spec(name)
    if spec and spec.submodule_search_locations is not None:
        spec = _spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec else None
    if spec is None or code is None:
        raise UsageError(
            f"-m needs the name of a Python module, got {name!r}, which is not found or cannot be "
            f"run. Check the name; the working directory is {Path.cwd()}."
        )
    values = {"__file__": spec.origin, "__loader__": spec.loader, "__cached__": spec.cached}
    return Program(code, values | {"__spec__": spec, "__package__": spec.parent})


def _spec(name: str) -> ModuleSpec | None:
    parent = name.rpartition(".")[0]
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name and (parent == error.name or parent.startswith(error.name + ".")):
            return None
        raise
    except ValueError:
        return None


@contextlib.contextmanager
def _without_callers(besides: type[BaseException]) -> Iterator[None]:
    """Lets Python show the error that ends the process as if nothing were around the script."""
    try:
        yield
    except besides:
        raise
    except BaseException as error:
        sys.excepthook = functools.partial(_show, sys.excepthook, error, script_trace(error))
        raise


def _show(
    show: Callable[..., object],
    ours: BaseException,
    trace: TracebackType | None,
    kind: type[BaseException],
    error: BaseException,
    full: TracebackType | None,
) -> None:
    if error is ours:
        error, full = error.with_traceback(trace), trace
    show(kind, error, full)


def script_trace(error: BaseException) -> TracebackType | None:
    """Returns the traceback of an error from the script's own first frame on."""
    trace = error.__traceback__
    while trace and _is_ours(trace):
        trace = trace.tb_next
    return trace


def _is_ours(trace: TracebackType) -> bool:
    name = trace.tb_frame.f_code.co_filename
    return name.startswith(_NOT_THE_SCRIPT) or name == contextlib.__file__


def _check_file(name: str, command: str) -> None:
    path = Path(name)
    if not path.exists():
        raise UsageError(
            f"{command} needs the path of a Python script, got {name!r}, which does not exist. "
            f"Check the path; the working directory is {Path.cwd()}."
        )
    if not path.is_file():
        raise UsageError(
            f"{command} needs a Python file, got {name!r}, which is not a file. "
            f"Name the script itself, such as {path / 'train.py'}."
        )
    if not os.access(path, os.R_OK):
        raise UsageError(
            f"{command} needs a Python file that can be read, got {name!r}, which cannot be. "
            f"Let yourself read it: chmod u+r {name}."
        )
