"""The numbers that somebody gave a name to before a function was traced."""

import ast
import contextlib
import inspect
import linecache
from collections.abc import Iterator
from typing import Any

import numpy as np

from halfstep.jax._diagnosing._written import Written, is_low
from halfstep.jax._private import closed_over


def assigned(function: Any) -> Iterator[Written]:
    """Yields what was written for each constant that a function closes over and is inf in.

    Args:
        function: The function, in whose file the names are looked for.
    """
    for name, leaf, owner in closed_over(function):
        for node, line in _assignments(owner, name) if _is_lost(leaf) else ():
            array = np.asarray(leaf)
            found = (Written(_within(array, each), "", line) for each in _numbers(node))
            yield from (each for each in found if each.becomes(array))


def _within(array: Any, numbers: Any) -> Any:
    """Returns what an array was if a number became the inf in it."""
    return np.where(np.isinf(array), numbers, array) if numbers.ndim == 0 else numbers


def _is_lost(leaf: Any) -> bool:
    return is_low(leaf) and bool(np.isinf(np.asarray(leaf)).any())


def _assignments(function: Any, name: str) -> Iterator[tuple[ast.expr, str]]:
    """Yields what the file of a function assigns to a name, and in which line."""
    with contextlib.suppress(TypeError, SyntaxError):
        file = inspect.getsourcefile(function) or ""
        for node in ast.walk(ast.parse("".join(linecache.getlines(file)))):
            if isinstance(node, ast.Assign) and any(_is_named(it, name) for it in node.targets):
                yield node.value, f"{file}:{node.lineno}"


def _is_named(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _numbers(node: ast.expr) -> Iterator[Any]:
    """Yields the numbers, and lists of numbers, in an expression."""
    for part in ast.walk(node):
        with contextlib.suppress(ValueError, TypeError, SyntaxError):
            array = np.array(ast.literal_eval(part), np.float64)
            if array.size:
                yield array
