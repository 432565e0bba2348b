"""Makes loss scales known to flax, whose state dicts hold only types that were registered."""

import sys
from typing import Any

import jax

_TOLD: set[type] = set()


def tell_flax(kind: type) -> None:
    """Registers a tree whose leaves have names, once flax is loaded.

    It is called whenever a value is made, because flax may be loaded later than halfstep.
    """
    flax = sys.modules.get("flax.serialization")
    if flax is not None and kind not in _TOLD:
        flax.register_serialization_state(kind, _to_state_dict, _from_state_dict)
        _TOLD.add(kind)


def _to_state_dict(value: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(value)
    return {path[0].name: leaf for path, leaf in leaves}


def _from_state_dict(value: Any, state: dict[str, Any]) -> Any:
    leaves = [state[name] for name in _to_state_dict(value)]
    return jax.tree.unflatten(jax.tree.structure(value), leaves)
