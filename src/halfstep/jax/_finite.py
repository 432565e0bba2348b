"""Whether trees are finite, and which of two trees is taken."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from halfstep.errors import NotScalarError, UsageError
from halfstep.jax._numbers import is_inexact

Tree = TypeVar("Tree")

INF, NAN = 1, 2


def all_finite(tree: Any) -> jax.Array:
    """Returns whether every number of a tree is finite, as one boolean on the device.

    Leaves that cannot be anything else, such as integers, count as finite.

    Args:
        tree: Arrays and numbers.

    Example:
        >>> import jax.numpy as jnp
        >>> bool(all_finite({"w": jnp.ones(2), "b": jnp.array(jnp.inf)}))
        False
    """
    leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return jnp.stack(leaves).all() if leaves else jnp.array(True)


def select_tree(pred: Any, a: Tree, b: Tree) -> Tree:
    """Returns the first tree where the predicate holds, else the second.

    Args:
        pred: One boolean, as `all_finite` returns.
        a: Arrays.
        b: Arrays of the same shapes and dtypes.

    Raises:
        NotScalarError: If the predicate is not one boolean.
        UsageError: If the trees differ in structure, or two leaves in shape or dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> select_tree(jnp.bool_(False), {"w": jnp.ones(2)}, {"w": jnp.zeros(2)})
        {'w': Array([0., 0.], dtype=float32)}
    """
    pred = one_boolean("select_tree", pred)
    structures: list[Any] = [jax.tree.structure(each) for each in (a, b)]
    if structures[0] != structures[1]:
        raise UsageError(
            "select_tree needs two trees of the same structure, got "
            f"{' and '.join(map(str, structures))}. Select from what the same function returned."
        )

    def pick(path: Any, first: Any, second: Any) -> Any:
        _check_alike(path, first, second)
        return jax.lax.select(pred, jnp.asarray(first), jnp.asarray(second))

    return jax.tree_util.tree_map_with_path(pick, a, b)


def one_boolean(thing: str, value: Any) -> jax.Array:
    """Returns a value as an array, which must be one boolean."""
    array = jnp.asarray(value)
    if array.ndim or array.dtype != jnp.bool_:
        raise NotScalarError(
            f"{thing} needs one boolean (expected boolean scalar), got {array.dtype.name} of shape "
            f"{array.shape}. Write for example all_finite(grads)."
        )
    return array


def _check_alike(path: Any, *leaves: Any) -> None:
    kinds = [f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in leaves]
    if len({*kinds}) > 1:
        raise UsageError(
            f"select_tree needs trees of the same shapes and dtypes, got {' and '.join(kinds)} at "
            f"{jax.tree_util.keystr(path) or 'the root'}. Convert one of them, as with astype."
        )


def nonfinite_kinds(tree: Any) -> jax.Array:
    """Returns for each leaf whether it holds an inf (1), a NaN (2), both (3) or neither (0)."""
    kinds = [_kind(leaf) for leaf in jax.tree.leaves(tree)]
    return jnp.stack(kinds) if kinds else jnp.zeros(0, jnp.uint8)


def _kind(leaf: Any) -> jax.Array:
    if not is_inexact(leaf):
        return jnp.uint8(0)
    # One reduction: with two of them, even a step that is not skipped takes longer on a CPU.
    none, axes = (jnp.bool_(False), jnp.bool_(False)), tuple(range(jnp.ndim(leaf)))
    inf, nan = jax.lax.reduce((jnp.isinf(leaf), jnp.isnan(leaf)), none, _either, axes)
    return inf.astype(jnp.uint8) * INF | nan.astype(jnp.uint8) * NAN


def _either(a: Any, b: Any) -> Any:
    return tuple(one | other for one, other in zip(a, b, strict=True))
