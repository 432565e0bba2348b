"""What the host can tell about skipped steps, from the state of the optimizer."""

from typing import Any

import jax

from halfstep.core import Culprits, culprits_text, where_from
from halfstep.errors import NonFiniteError, UsageError
from halfstep.jax._finite import INF, NAN
from halfstep.jax._region import UNADAPTED
from halfstep.jax._scale import DynamicLossScale, NoOpLossScale
from halfstep.jax._transformations._skipping import ApplyIfFiniteState
from halfstep.jax._transformations._states import states_of

_REGIONS = (
    "Where a region of halfstep.jax.autocast brings gradients to {:g}, which is too much for some "
    "sums in float16, write autocast(f, policy, scale={}), or give it this state as scale=, with "
    'apply_if_finite(..., loss_scale="dynamic"), which comes down by itself.'
)
_STATES = (
    "Where the scale, {:g}, is too much for a sum in float16, lower {}; a region of "
    "halfstep.jax.autocast has its own, {:g}, unless it is given this state as scale=."
)
_OTHERWISE = (
    "Otherwise compute what is behind them in float32, use bfloat16, or lower the learning rate; "
    f"if the loss itself is not finite, no loss scale helps. {where_from('jax')}"
)
_KINDS = {INF: "inf", NAN: "nan", INF | NAN: "inf and nan"}


def nonfinite(state: Any, params: Any) -> Culprits:
    """Returns which gradients were not finite in the last skipped step, and what they held.

    Reading it waits for the device.

    Args:
        state: The state of an optimizer that has an `apply_if_finite`, anywhere in it.
        params: The parameters, for their names.

    Raises:
        UsageError: If there is not exactly one such state, or the parameters are not its own.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = apply_if_finite(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2), "b": jnp.ones(1)}
        >>> grads = {"w": jnp.array([1.0, jnp.nan]), "b": jnp.ones(1)}
        >>> _, state = optimizer.update(grads, optimizer.init(params))
        >>> nonfinite(state, params)
        (("['w']", 'nan'),)
    """
    held = jax.device_get(_found(state).nonfinite).tolist()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if len(paths) != len(held):
        raise UsageError(
            f"nonfinite needs the parameters that the optimizer trains, {len(held)} leaves, got "
            f"{len(paths)}. Pass the tree that init() got."
        )
    return tuple((path, _KINDS[kind]) for path, kind in zip(paths, held, strict=True) if kind)


def check_skips(state: Any, params: Any = None) -> None:
    """Raises an error if training stands still because gradients are not finite.

    It waits for the device: call it now and then, not in every step.

    Args:
        state: The state of an optimizer that has an `apply_if_finite`, anywhere in it.
        params: The parameters, for their names in the error.

    Raises:
        NonFiniteError: If `max_consecutive_errors` steps in a row were skipped, or the last one
            was although the scale could go no lower.
        UsageError: If there is not exactly one such state.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = apply_if_finite(optax.sgd(0.5), 1)
        >>> _, state = optimizer.update(jnp.float32(jnp.nan), optimizer.init(jnp.float32(1.0)))
        >>> check_skips(state)
        Traceback (most recent call last):
        ...
        halfstep.errors.NonFiniteError: apply_if_finite needs fewer than ...
    """
    found = _found(state)
    row, limit, at_floor = jax.device_get(
        (found.notfinite_count, found.max_consecutive_errors, found.at_floor)
    )
    if row >= limit:
        raise NonFiniteError(
            f"apply_if_finite needs fewer than max_consecutive_errors={limit} skipped steps in a "
            f"row, got {row}, because gradients were not finite. {_advice(found, params)}"
        )
    if at_floor:
        raise NonFiniteError(
            "apply_if_finite needs finite gradients at its smallest scale, but they were not at "
            f"{found.loss_scale.state.scale:g}, and min_scale lets it go no lower. "
            f"{_advice(found, params)}"
        )


def _found(state: Any) -> ApplyIfFiniteState:
    found = states_of(ApplyIfFiniteState, state)
    if len(found) != 1:
        raise UsageError(
            f"The state needs exactly one ApplyIfFiniteState in it, got {len(found)}. Pass the "
            "state of an optimizer that was wrapped in apply_if_finite once."
        )
    return found[0]


def _advice(state: ApplyIfFiniteState, params: Any) -> str:
    who = "Pass params to be told which ones. "
    if params is not None:
        named = ((path or "the only one", kind) for path, kind in nonfinite(state, params))
        who = f"Leaves with non-finite gradients: {culprits_text(tuple(named))}. "
    return f"{who}{_about_scale(state.loss_scale)} {_OTHERWISE}"


def _about_scale(scale: Any) -> str:
    """Returns how to lower what gradients are multiplied by, in a region or with the loss."""
    if isinstance(scale, NoOpLossScale) or not hasattr(scale, "loss_scale"):
        return _REGIONS.format(UNADAPTED, UNADAPTED / 16)
    return _STATES.format(float(scale.loss_scale), _setting(scale), UNADAPTED)


def _setting(scale: Any) -> str:
    if not isinstance(scale, DynamicLossScale):
        return "it"
    return "min_scale" if bool(scale.at_floor) else "init_scale"
