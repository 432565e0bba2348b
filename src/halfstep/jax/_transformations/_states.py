"""Finds the state of a transformation in that of the optimizer around it."""

from typing import Any, TypeVar

import jax

State = TypeVar("State")


def states_of(kind: type[State], state: Any) -> list[State]:
    """Returns the states of a kind that are anywhere in a state.

    Args:
        kind: The class of the states.
        state: Where they are looked for.

    Example:
        >>> from collections import namedtuple
        >>> Counted = namedtuple("Counted", "count")
        >>> states_of(Counted, {"inner": (Counted(1), 2.0)})
        [Counted(count=1)]
    """
    leaves = jax.tree.leaves(state, is_leaf=lambda each: isinstance(each, kind))
    return [each for each in leaves if isinstance(each, kind)]
