"""Modules whose state a call may change, as those of Flax's nnx do."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Copies:
    """Arguments whose modules are copies that may be changed.

    Args:
        tree: The arguments.
        changes: Returns what was changed.
    """

    tree: Any
    changes: Callable[[], Any]


@dataclass(frozen=True)
class Held:
    """Arguments whose modules are replaced by plain trees.

    Args:
        tree: The arguments.
        put_together: Makes modules of such a tree again.
        change: Does to the modules what was done to their copies.
    """

    tree: Any
    put_together: Callable[[Any], Copies]
    change: Callable[[Any], None]


def taken_apart(tree: Any) -> Held:
    """Returns arguments without modules."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not any(map(_is_module(nnx), _leaves(tree, nnx))):
        return Held(tree, lambda same: Copies(same, lambda: ()), lambda changes: None)
    return _of_nnx(tree, nnx)


def leaves_with_path(tree: Any) -> list[tuple[Any, Any]]:
    """Returns the leaves of arguments without modules, with where they are in those with them."""
    found: list[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(taken_apart(tree).tree)
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not any(map(_is_module(nnx), _leaves(tree, nnx))):
        return found
    outer = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_module(nnx))
    return [((*outer[_number(at[1])][0], *at[2:]), leaf) for at, leaf in found]


def _number(key: Any) -> int:
    return int(key.idx if hasattr(key, "idx") else key.key)


def _is_module(nnx: Any) -> Callable[[Any], bool]:
    return lambda leaf: isinstance(leaf, nnx.Module | nnx.Variable | nnx.Rngs | nnx.Optimizer)


def _leaves(tree: Any, nnx: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_module(nnx))


def _of_nnx(tree: Any, nnx: Any) -> Held:
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_module(nnx))
    modules = [leaf if _is_module(nnx)(leaf) else None for leaf in leaves]
    graph, state = nnx.split(modules)

    def put_together(pair: Any) -> Copies:
        others, inner = pair
        copies = nnx.merge(graph, inner)
        together = [b if a is None else a for a, b in zip(copies, others, strict=True)]
        return Copies(jax.tree.unflatten(structure, together), lambda: nnx.split(copies)[1])

    others = [
        None if module is not None else leaf for module, leaf in zip(modules, leaves, strict=True)
    ]
    return Held((others, state), put_together, lambda changes: nnx.update(modules, changes))
