"""What `halfstep memory` is pointed at: a script, a module, or what builds a model."""

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from halfstep.errors import UsageError
from halfstep.launch import Script

_DEFAULT_OPTIMIZER = "AdamW"
_CALLABLE = re.compile(r"(?P<place>.+):(?P<name>[^\W\d]\w*(\.[^\W\d]\w*)*)")


@dataclass(frozen=True)
class Target:
    """A training script, or a callable that returns a model.

    Args:
        name: As the user wrote it.
        args: The script's own arguments.
        module: Whether `name` is the name of a module to run.
        optimizer: What trains a model: a name, and options after commas.
    """

    name: str
    args: tuple[str, ...] = ()
    module: bool = False
    optimizer: str = _DEFAULT_OPTIMIZER

    @classmethod
    def of(
        cls,
        name: str,
        args: tuple[str, ...] = (),
        *,
        module: bool = False,
        optimizer: str | None = None,
    ) -> Self:
        """Returns the target that a command line asks for, or says what is wrong with it.

        Args:
            name: A path, the name of a module, or one of both with `:` and a callable.
            args: The script's own arguments.
            module: Whether `name` is the name of a module to run.
            optimizer: What trains a model, None for the default one.
        """
        target = cls(name, args, module, optimizer or _DEFAULT_OPTIMIZER)
        if target.builds:
            _refuse(" ".join(args), "script arguments", "a callable", "a script")
            _refuse(module, "-m", "a callable", "a module to run")
        else:
            _refuse(optimizer, "--optimizer", "a script, which has its own", "a callable")
        if target.is_file or not target.builds:
            Script(target.place if target.builds else name, args, module).check("memory")
        return target

    @property
    def builds(self) -> bool:
        """Whether it is a callable that returns a model.

        Example:
            >>> Target("package.module:build").builds, Target("train.py").builds
            (True, False)
        """
        return _CALLABLE.fullmatch(self.name) is not None

    @property
    def place(self) -> str:
        """The file or the module of a callable."""
        return self.name.rpartition(":")[0]

    @property
    def is_file(self) -> bool:
        """Whether the callable is in a file that is named by its path."""
        return self.place.endswith(".py") or os.sep in self.place

    @property
    def folder(self) -> str:
        """What is put first on `sys.path`."""
        return os.path.dirname(os.path.realpath(self.place)) if self.is_file else os.getcwd()

    def load(self) -> Callable[[], Any]:
        """Imports the callable."""
        found: Any = _file(self.place) if self.is_file else self._imported()
        name = self.name.rpartition(":")[2]
        for each in name.split("."):
            if not hasattr(found, each):
                raise UsageError(
                    f"memory needs a callable that is there, got {name!r}, which {self.place} does "
                    f"not have. Write one that returns a model, such as {self.place}:build."
                )
            found = getattr(found, each)
        return self._checked(found)

    def _imported(self) -> ModuleType:
        try:
            return import_module(self.place)
        except ModuleNotFoundError as error:
            if not error.name or not f"{self.place}.".startswith(f"{error.name}."):
                raise  # something that the module itself needs
            raise UsageError(
                f"memory needs a module that can be imported, got {self.place!r}, which is not "
                f"found. Check the name; the working directory is {Path.cwd()}."
            ) from None

    def _checked(self, found: Any) -> Callable[[], Any]:
        # A module can be called, but not without inputs, and not to be built anew.
        is_module = hasattr(found, "named_parameters") and not isinstance(found, type)
        build: Callable[[], Any] = found
        if callable(found) and not is_module:
            return build
        raise UsageError(
            f"memory needs a callable that builds a model, got {self.name}, which is a "
            f"{type(found).__name__}. Write a function without arguments that returns the model."
        )


def _refuse(given: Any, what: str, where: str, instead: str) -> None:
    if given:
        raise UsageError(
            f"memory needs no {what} with {where}, got {given!r}. Leave it out, or name {instead}."
        )


def _file(path: str) -> ModuleType:
    name = Path(path).stem
    spec = spec_from_file_location(name, os.path.abspath(path))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
