"""Takes apart what a function is called with, and what it returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp

from halfstep.jax import _modules
from halfstep.jax._private import speaking_of

ROOTS = ("args", "kwargs")


@dataclass(frozen=True)
class Split:
    """The arrays of real numbers among the leaves of a tree, and all else.

    Args:
        structure: The tree without leaves.
        rest: The leaves, None where an array was.
        places: Where the arrays were.
    """

    structure: Any
    rest: tuple[Any, ...]
    places: tuple[int, ...]

    def joined(self, arrays: Sequence[Any]) -> Any:
        """Returns the tree with other arrays."""
        leaves = list(self.rest)
        for place, array in zip(self.places, arrays, strict=True):
            leaves[place] = array
        return jax.tree.unflatten(self.structure, leaves)


def split(tree: Any, is_array: Callable[[Any], bool]) -> tuple[list[Any], Split]:
    """Returns the arrays of a tree, and what is left of it."""
    leaves, structure = jax.tree.flatten(tree)
    places = tuple(place for place, leaf in enumerate(leaves) if is_array(leaf))
    rest = tuple(None if place in places else leaf for place, leaf in enumerate(leaves))
    return [leaves[place] for place in places], Split(structure, rest, places)


def is_real(leaf: Any) -> bool:
    """Returns whether a leaf is an array that gradients may flow through.

    All else stays what it is: a program may branch on a Python number or an array of integers.
    """
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf of a result was computed."""
    return isinstance(leaf, jax.Array)


@dataclass(frozen=True)
class Traced:
    """A function as it was traced on arguments.

    Args:
        closed: The program.
        operands: The arrays that it is to be called with.
        finish: Makes the result from the arrays that it returns.
    """

    closed: Any
    operands: list[Any]
    finish: Callable[[Sequence[Any]], Any]


def _names(arguments: Any) -> list[str]:
    """Returns what the arrays in modules and in other arguments are called."""
    paths = (path for path, _ in _modules.leaves_with_path(arguments))
    return [f"{ROOTS[root.idx]}{jax.tree_util.keystr(tuple(rest))}" for root, *rest in paths]


def traced(
    function: Callable[..., Any],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    is_operand: Callable[[Any], bool],
) -> Traced:
    """Traces a function on arguments of any kind.

    Args:
        function: The function.
        arguments: Its positional arguments, and those by name.
        is_operand: Whether a leaf of them is an operand of the program.
    """
    held = _modules.taken_apart(arguments)
    operands, given = split(held.tree, is_operand)
    results: list[Split] = []

    def run(*arrays: Any) -> list[Any]:
        copies = held.put_together(given.joined(arrays))
        inner_args, inner_kwargs = copies.tree
        out = function(*inner_args, **inner_kwargs)
        found, result = split((out, copies.changes()), is_array)
        results.append(result)
        return found

    names = None if held.tree is arguments else _names(arguments)
    told = speaking_of(run, function, *arguments, given.places, names)
    closed = jax.make_jaxpr(told)(*operands)

    def finish(arrays: Sequence[Any]) -> Any:
        out, changes = results[-1].joined(arrays)
        held.change(changes)
        return out

    return Traced(closed, operands, finish)
