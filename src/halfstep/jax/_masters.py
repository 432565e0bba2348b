"""Float32 masters of low-precision parameters, beside the state of any optax optimizer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from halfstep.errors import UsageError
from halfstep.jax._numbers import is_low
from halfstep.jax._transformations._installed import checked_inner, optax_for
from halfstep.jax._transformations._layouts import LAYOUTS, Layout, chosen, widened
from halfstep.jax._transformations._states import states_of
from halfstep.jax._transformations._updates import apply_updates


class WithMastersState(NamedTuple):
    """The state of `with_masters`.

    Args:
        inner_state: The state of the inner transformation, in float32.
        masters: For each parameter its float32 master, or the int16 that it lacks, or None where
            the parameter is its own master.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = with_masters(optax.sgd(0.1), layout="split")
        >>> optimizer.init({"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(1)}).masters
        {'b': None, 'w': Array([0, 0], dtype=int16)}
    """

    inner_state: Any
    masters: Any


def with_masters(inner: Any, layout: str = "cast") -> Any:
    """Returns the transformation that trains low-precision parameters through float32 masters.

    The inner transformation sees float32 parameters and gradients, as its own state is in float32;
    the updates bring each parameter to its master, rounded. So the masters get, operation by
    operation, the bits of float32 parameters with the same gradients, and no small update is lost.

    * `cast` keeps the masters beside the parameters: 4 more bytes for each. A parameter that
      somebody else changed since the last step becomes its own master again.
    * `split` keeps the 16 bits of each master that a bfloat16 lacks: 2 more bytes for each.

    Parameters in float32 are their own masters, in both. Apply the updates with
    `halfstep.jax.apply_updates` or `optax.apply_updates`, as they are: what changes updates, such
    as clipping or a learning rate, belongs into `inner` or before it.

    Args:
        inner: Any transformation, such as `optax.adamw(1e-3)`.
        layout: `"cast"` or `"split"`.

    Raises:
        MissingExtraError: If optax is not installed.
        UsageError: If there is no such layout, `inner` is no transformation, or a parameter has a
            dtype that it cannot keep.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from halfstep.jax import apply_updates
        >>> optimizer = with_masters(optax.sgd(2.0**-10), layout="split")
        >>> weight = jnp.bfloat16(1.0)
        >>> state = optimizer.init(weight)
        >>> for _ in range(8):
        ...     updates, state = optimizer.update(jnp.bfloat16(1.0), state, weight)
        ...     weight = apply_updates(weight, updates)
        >>> weight, master_params(state, weight)
        (Array(0.992188, dtype=bfloat16), Array(0.9921875, dtype=float32))
    """
    optax = optax_for("with_masters")
    how, inner = chosen(layout), checked_inner("with_masters", inner)

    def init(params: Any) -> WithMastersState:
        jax.tree_util.tree_map_with_path(how.check, params)
        masters = jax.tree.map(lambda leaf: how.start(leaf) if is_low(leaf) else None, params)
        return WithMastersState(inner.init(jax.tree.map(widened, params)), masters)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        masters = _read(state, params, how)
        updates = jax.tree.map(widened, updates)
        updates, inner_state = inner.update(updates, state.inner_state, masters, **extra_args)
        updates, kept = _advance(how, params, masters, updates, state.masters)
        return updates, WithMastersState(inner_state, kept)

    return optax.GradientTransformationExtraArgs(init, update)


def master_params(state: Any, params: Any) -> Any:
    """Returns the parameters in float32, with all the bits of their masters.

    Args:
        state: The state of an optimizer that has a `with_masters`, anywhere in it.
        params: The parameters that belong to it.

    Raises:
        UsageError: If there is not exactly one such state.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = with_masters(optax.sgd(0.1))
        >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
        >>> master_params(optimizer.init(params), params)
        {'w': Array([1., 1.], dtype=float32)}
    """
    found = states_of(WithMastersState, state)
    if len(found) != 1:
        raise UsageError(
            f"master_params needs exactly one WithMastersState in the state, got {len(found)}. "
            "Pass the state of an optimizer that was wrapped in with_masters once."
        )
    kept = jax.tree.leaves(found[0].masters)
    layout = "split" if kept and kept[0].dtype == jnp.int16 else "cast"
    return _read(found[0], params, LAYOUTS[layout])


def _advance(how: Layout, params: Any, masters: Any, updates: Any, kept: Any) -> tuple[Any, Any]:
    """Returns the updates that bring parameters to new masters, and what is kept of these."""

    def step(param: Any, master: Any, update: Any, kept: Any) -> tuple[Any, Any]:
        if kept is None:
            return update, None
        return how.step(param, apply_updates(master, update))

    structure: Any = jax.tree.structure(params)
    rows = zip(*map(structure.flatten_up_to, (params, masters, updates, kept)), strict=True)
    steps = [step(*row) for row in rows]
    return tuple(structure.unflatten([pair[number] for pair in steps]) for number in (0, 1))


def _read(state: WithMastersState, params: Any, how: Layout) -> Any:
    if params is None:
        raise UsageError(
            "with_masters needs the parameters, got None. "
            "Write optimizer.update(grads, state, params)."
        )

    def read(path: Any, param: Any, kept: Any) -> Any:
        if kept is None:
            return param
        if not is_low(param):
            raise UsageError(
                "with_masters needs the parameters in the dtypes that init() got, got "
                f"{param.dtype.name} at {jax.tree_util.keystr(path) or 'the root'}. Apply updates "
                "with halfstep.jax.apply_updates, which keeps dtypes."
            )
        return how.read(param, kept)

    return jax.tree_util.tree_map_with_path(read, params, state.masters)
