"""Refuses gradients that are not like the parameters that a state was made of."""

from typing import Any

import jax

from halfstep.errors import UsageError

_NEEDS = "The update of {name} needs {expected}, got {given}. Write {instead}."
_STATE = "opt_state = optimizer.init(params), and call update(grads, opt_state, params)"
_GRADS = "jax.grad(loss)(params), with the params that init was called with"


def check_state(name: str, state: Any, kind: type) -> None:
    """Raises where a state is not that of a transformation.

    Args:
        name: What the transformation is called.
        state: The state.
        kind: What it should be.

    Raises:
        UsageError: It is another one, such as that of the inner transformation.
    """
    if not all(hasattr(state, field) for field in getattr(kind, "_fields", ())):
        expected = f"the state that its init returned, a {kind.__name__}"
        raise _refusal(name, expected, f"a {type(state).__name__}", _STATE)


def check_updates(name: str, updates: Any, params: Any, count: int) -> None:
    """Raises where gradients are not like the parameters.

    Args:
        name: What the transformation is called.
        updates: The gradients.
        params: The parameters, None where the caller gave none.
        count: How many arrays the parameters had when the state was made.

    Raises:
        UsageError: There are more or fewer of them, or one has another place or shape.
    """
    found = _shapes(updates)
    known = found if params is None else _shapes(params)
    for place, shape in found.items():
        if known.get(place, shape) != shape:
            expected = f"gradients in the shapes of the parameters, {known[place]} at {place}"
            raise _refusal(name, expected, str(shape), _GRADS)
    unknown = [place for place in found if place not in known]
    if unknown or len(found) != count:
        where = "" if params is None else f" at {_listed(known)}"
        expected = f"gradients of the {count} arrays that init was called with{where}"
        raise _refusal(name, expected, f"{len(found)} at {_listed(found)}", _GRADS)


def refused(name: str, updates: Any, error: Exception) -> UsageError:
    """Returns what to raise where the inner transformation cannot take gradients.

    Args:
        name: What the transformation is called.
        updates: The gradients.
        error: What the inner one has raised.
    """
    given = f"{_listed(_shapes(updates))}, of which it says: {str(error).splitlines()[0]}"
    return _refusal(name, "gradients that the inner transformation can take", given, _GRADS)


def _refusal(name: str, expected: str, given: str, instead: str) -> UsageError:
    return UsageError(_NEEDS.format(name=name, expected=expected, given=given, instead=instead))


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path) or "the root": getattr(leaf, "shape", ())
        for path, leaf in leaves
    }


def _listed(shapes: dict[str, Any]) -> str:
    first = list(shapes)[:4]
    return ", ".join([*first, "..."] if len(shapes) > len(first) else first) or "nothing"
