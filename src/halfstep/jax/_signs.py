"""What the arguments and results of a training step tell: its loss, its scale, its soundness."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from halfstep.jax._steps import Call

_SCALES = ("loss_scale", "scale")
_UNKNOWN = "\0"


class Signs(NamedTuple):
    """What is on the device until somebody reads it, all at once.

    Args:
        loss: The loss, None where it is not clear what is one.
        finite: Of each array of floating-point numbers in the results, whether it is finite.
        before: The loss scale that the step was called with, None where there is none.
        after: The one that it returned.
        sound: Whether the gradients were finite, None where nothing tells.
    """

    loss: Any
    finite: list[Any]
    before: Any
    after: Any
    sound: Any

    def read(self) -> "Signs":
        """Returns the same on the host, which waits for the step."""
        return Signs(*jax.device_get(tuple(self)))

    @property
    def broken(self) -> int:
        """How many arrays are not finite."""
        return sum(not each for each in self.finite)

    @property
    def backed_off(self) -> bool:
        """Whether the loss scale is lower than before."""
        known = self.before is not None and self.after is not None
        return known and float(self.after) < float(self.before)


def signs_of(call: Call) -> Signs:
    """Returns what a call tells.

    Args:
        call: It.
    """
    given = (call.args, call.kwargs)
    before, after = scale_in(given), scale_in(call.result)
    known = call.given.loss
    loss = known(call.result) if known else _loss(call.result, given)
    return Signs(loss, finite(call.result), before, after, _sound(call.result))


def finite(tree: Any) -> list[Any]:
    """Returns of each array of floating-point numbers whether it is finite, on the device.

    Example:
        >>> [bool(each) for each in finite({"a": jnp.array([1.0, jnp.inf]), "b": jnp.zeros(2)})]
        [False, True]
    """
    return [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if _is_inexact(leaf)]


def scale_in(tree: Any) -> Any:
    """Returns the loss scale in a tree, None where there is none.

    Example:
        >>> float(scale_in({"params": jnp.ones(2), "loss_scale": jnp.float32(8.0)}))
        8.0
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_scale)
    objects = (leaf.loss_scale for _, leaf in leaves if _is_scale(leaf))
    named = (leaf for path, leaf in leaves if _name(path) in _SCALES and _may_scale(leaf))
    return next(objects, next(named, None))


def _may_scale(leaf: Any) -> bool:
    return isinstance(leaf, float) or _is_number(leaf)


def _is_scale(leaf: Any) -> bool:
    """Returns whether it is a loss scale of halfstep or jmp."""
    return hasattr(leaf, "loss_scale") and hasattr(leaf, "adjust")


def _sound(result: Any) -> Any:
    """Returns what `apply_if_finite`, of halfstep or optax, says of the step."""
    leaves = jax.tree_util.tree_leaves_with_path(result)
    return next((leaf for path, leaf in leaves if _name(path) == "last_finite"), None)


def _loss(result: Any, given: Any) -> Any:
    """Returns the number that is called a loss, or else is the only one that is no state."""
    leaves = jax.tree_util.tree_leaves_with_path(result)
    numbers = [(path, leaf) for path, leaf in leaves if _is_number(leaf)]
    called = [pair for pair in numbers if any(map(_is_loss, _names(pair[0])))]
    state = {_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(given)} - {_UNKNOWN}
    others = [pair for pair in numbers if _name(pair[0]) not in {*state, *_SCALES}]
    return _shallowest(called) if called else _shallowest(others)


def _shallowest(found: Sequence[tuple[Any, Any]]) -> Any:
    depth = min((len(path) for path, _ in found), default=0)
    there = [leaf for path, leaf in found if len(path) == depth]
    return there[0] if len(there) == 1 else None


def _is_loss(name: str) -> bool:
    return "loss" in name and "scale" not in name


def _names(path: Any) -> Iterator[str]:
    """Yields the names in a path, without the numbers."""
    for key in path:
        name = getattr(key, "name", getattr(key, "key", None))
        if isinstance(name, str):
            yield name


def _name(path: Any) -> str:
    return next(_names(path[-1:]), _UNKNOWN)


def _is_number(leaf: Any) -> bool:
    return _is_inexact(leaf) and leaf.shape == () and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_inexact(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))


def power_of(scale: float) -> int:
    """Returns the exponent of a scale."""
    return math.frexp(scale)[1] - 1
