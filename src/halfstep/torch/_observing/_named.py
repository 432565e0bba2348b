"""What models are called: as the variables that a script keeps them in, or by their classes."""

import contextlib
import functools
import inspect
import os
import sys
import weakref
from collections.abc import Iterator, Mapping
from itertools import chain, count
from types import FrameType
from typing import Any

import torch
from torch import nn

import halfstep
from halfstep.torch._engine._paths import _unwrapped

# Their lines, and those of what they are run by, are nobody's own.
_OWN = (
    *(f"{os.path.dirname(each.__file__ or '')}{os.sep}" for each in (torch, halfstep)),
    contextlib.__file__,
    functools.__file__,
)
_Scope = Mapping[str, Any]
# Whoever calls a model from a method; it may be the model itself.
_OWNER = "self"


def is_own(filename: str) -> bool:
    """Returns whether a file is one of PyTorch, halfstep or what they are run by.

    Example:
        >>> is_own(torch.__file__), is_own("train.py")
        (True, False)
    """
    return filename.startswith(_OWN)


def below(name: str, path: str) -> str:
    """Returns the path of a module with the name of its model in front.

    Example:
        >>> below("encoder", "0"), below("encoder", "")
        ('encoder.0', 'encoder')
    """
    return f"{name}.{path}" if path else name


class Names:
    """Gives each model a name of its own, and the same one each time.

    Args:
        taken: What no model may be called.

    Example:
        >>> names, encoder = Names(), nn.Linear(1, 1)
        >>> names.of(encoder), names.of(nn.Linear(1, 1))
        ('encoder', 'Linear')
    """

    def __init__(self, *taken: str) -> None:
        self._taken = taken
        self._known: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def of(self, model: nn.Module) -> str:
        """Returns the name of a model, that of a variable of those who call this where it is one.

        Args:
            model: The model.
        """
        found, name = self._known.get(id(model), (None, ""))
        if found is None or found() is not model:
            whole = _unwrapped(model)
            held = variable_of(model) or variable_of(whole)
            name = self._new(held or type(whole).__name__)
            self._known[id(model)] = weakref.ref(model), name
        return name

    def _new(self, name: str) -> str:
        living = {known for model, known in self._known.values() if model() is not None}
        numbered = (f"{name}#{number}" for number in count(2))
        free = (each for each in chain([name], numbered) if each not in {*living, *self._taken})
        return next(free)


def variable_of(model: nn.Module) -> str:
    """Returns the variable that holds a model in the code that runs, "" where none does.

    The outermost function is asked first: further in, one variable holds different models.

    Args:
        model: The model.

    Example:
        >>> head = nn.Linear(1, 1)
        >>> variable_of(head), variable_of(nn.Linear(1, 1))
        ('head', '')
    """
    scopes = [*_scopes(inspect.currentframe())][::-1]
    return next((name for values in scopes for name in _names_in(values, model)), "")


def _scopes(frame: FrameType | None) -> Iterator[_Scope]:
    while frame is not None:
        if not is_own(frame.f_code.co_filename):
            yield frame.f_locals
        frame = frame.f_back
    yield vars(sys.modules["__main__"])


def _names_in(values: _Scope, model: nn.Module) -> Iterator[str]:
    """Yields the names of a model, those first that were given first, and not by a loop."""
    for name, value in values.items():
        if name == _OWNER:
            yield from _names_in(_fields(value), model)
        elif value is model and name.isidentifier() and name[0] != "_":
            yield name
        for key, each in _pairs(value) if name.isidentifier() else ():
            if each is model:
                yield f"{name}[{key!r}]"


def _fields(value: Any) -> _Scope:
    """Returns the attributes of an object, such as a trainer, by the names without underscores."""
    fields = getattr(value, "__dict__", {})
    parts = value._modules if isinstance(value, nn.Module) else {}
    known = {**parts, **fields}.items()
    return {name.lstrip("_"): each for name, each in known if each is not parts}


def _pairs(value: Any) -> Iterator[tuple[Any, Any]]:
    if type(value) is dict:
        yield from value.items()
    elif type(value) in (list, tuple):
        yield from enumerate(value)
