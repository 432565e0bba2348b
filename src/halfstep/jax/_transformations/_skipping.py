"""Skipping the steps whose gradients are not finite, without asking the host."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from halfstep.core import LossScale
from halfstep.errors import UsageError
from halfstep.jax._finite import all_finite, nonfinite_kinds
from halfstep.jax._flax import tell_flax
from halfstep.jax._numbers import is_inexact
from halfstep.jax._rarely import only_if
from halfstep.jax._scale import AnyLossScale, DynamicLossScale, Rule
from halfstep.jax._scale import loss_scale as scale_of
from halfstep.jax._transformations._installed import checked_inner, optax_for
from halfstep.jax._transformations._matching import check_state, check_updates, refused

# No limit: more than any counter reaches.
_MOST = 2**31 - 1


class ApplyIfFiniteState(NamedTuple):
    """The state of `apply_if_finite`; the first four fields are those of optax.

    Args:
        notfinite_count: Skipped steps in a row.
        last_finite: Whether the last step was taken.
        total_notfinite: All skipped steps.
        inner_state: The state of the inner transformation, which no skipped step changes.
        step: All steps, taken or skipped.
        loss_scale: By which to scale the loss: `state.loss_scale.scale(loss)`.
        nonfinite: What each leaf of the last skipped gradients held; `nonfinite()` reads it.
        at_floor: Whether the last step was skipped although the scale could go no lower.
        max_consecutive_errors: After how many skipped steps in a row `check_skips()` raises.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = apply_if_finite(optax.sgd(0.5), loss_scale="dynamic(init_scale=8.0)")
        >>> state = optimizer.init(jnp.float32(1.0))
        >>> _, state = optimizer.update(jnp.float32(jnp.inf), state)
        >>> int(state.step), int(state.total_notfinite), float(state.loss_scale.loss_scale)
        (1, 1, 4.0)
    """

    notfinite_count: Any
    last_finite: Any
    total_notfinite: Any
    inner_state: Any
    step: Any
    loss_scale: Any
    nonfinite: Any
    at_floor: Any
    max_consecutive_errors: Any


def apply_if_finite(
    inner: Any,
    max_consecutive_errors: int = _MOST,
    *,
    loss_scale: Rule | AnyLossScale | None = None,
) -> Any:
    """Returns the transformation that skips an update whose gradients are not finite.

    Its updates are zero then, and the state of the inner transformation stays as it is, which
    never sees a number that is not finite. Nothing waits for the device. Unlike optax's function of
    this name it never gives in, because one such update destroys the parameters: call
    `check_skips` now and then.

    With a loss scale it takes gradients of the scaled loss, hands true ones on, in float32, and
    adjusts the scale.

    Args:
        inner: The transformation that gets finite gradients, such as `optax.adam(1e-3)`.
        max_consecutive_errors: After how many skipped steps in a row `check_skips` raises an error.
        loss_scale: A `halfstep.LossScale`, its text form or one of the loss scales of this
            package, by which the loss is scaled; None if it is not.

    Raises:
        MissingExtraError: If optax is not installed.
        UsageError: If the number of errors is not positive, or `inner` is no transformation; from
            its update, if the gradients are not like the parameters, or the state is another one.
        ScaleError: If the scale could destroy a run.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> optimizer = apply_if_finite(optax.sgd(0.5), loss_scale="dynamic(init_scale=8.0)")
        >>> weight = jnp.float32(3.0)
        >>> state = optimizer.init(weight)
        >>> grad = jax.grad(lambda weight: state.loss_scale.scale(weight**2))(weight)
        >>> updates, state = optimizer.update(grad, state, weight)
        >>> float(grad), float(updates)
        (48.0, -3.0)
    """
    optax = optax_for("apply_if_finite")
    limit = _checked_limit(max_consecutive_errors)
    inner, first = checked_inner("apply_if_finite", inner), scale_of(loss_scale)

    def init(params: Any) -> ApplyIfFiniteState:
        tell_flax(type(first))
        # No array twice, or one that is used elsewhere: a step may be given the state's memory.
        return ApplyIfFiniteState(
            notfinite_count=jnp.int32(0),
            last_finite=jnp.bool_(True),
            total_notfinite=jnp.int32(0),
            inner_state=inner.init(params),
            step=jnp.int32(0),
            loss_scale=jax.tree.map(jnp.copy, first),
            nonfinite=jnp.zeros(len(jax.tree.leaves(params)), jnp.uint8),
            at_floor=jnp.bool_(False),
            max_consecutive_errors=jnp.int32(limit),
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        check_state("apply_if_finite", state, ApplyIfFiniteState)
        check_updates("apply_if_finite", updates, params, state.nonfinite.shape[-1])

        def true() -> Any:
            # Once in each branch as well, because compilers do not look into these.
            return state.loss_scale.unscale(updates)

        def take() -> Any:
            safe = _finite_only(finite, true())
            try:
                taken, inner_state = inner.update(safe, state.inner_state, params, **extra_args)
            except (TypeError, ValueError) as error:
                if params is not None:
                    raise
                raise refused("apply_if_finite", updates, error) from error
            inner_state = jax.tree.map(_in_dtype_of, inner_state, state.inner_state)
            return taken, inner_state, state.nonfinite

        def leave() -> Any:
            unchanged = jax.tree.map(_no_update, jax.eval_shape(take)[0])
            return unchanged, state.inner_state, nonfinite_kinds(true())

        finite = all_finite(true())
        taken, inner_state, held = only_if(finite, take, leave)
        found = {"nonfinite": held, "max_consecutive_errors": jnp.int32(limit)}
        return taken, _counted(state, finite)._replace(inner_state=inner_state, **found)

    return optax.GradientTransformationExtraArgs(init, update)


def _finite_only(finite: Any, updates: Any) -> Any:
    """Returns the updates, or zeros: no inner transformation has to cope with other numbers."""
    return jax.tree.map(
        lambda leaf: jnp.where(finite, leaf, 0.0) if is_inexact(leaf) else leaf, updates
    )


def _no_update(leaf: Any) -> Any:
    """Returns the zero that changes no number, not even a negative zero."""
    return jnp.full(leaf.shape, -0.0 if is_inexact(leaf) else 0, leaf.dtype)


def _in_dtype_of(new: Any, old: Any) -> Any:
    dtype = jnp.result_type(old)
    return new if jnp.result_type(new) == dtype else jnp.asarray(new).astype(dtype)


def _counted(state: ApplyIfFiniteState, finite: Any) -> ApplyIfFiniteState:
    return state._replace(
        notfinite_count=jnp.where(finite, 0, _next(state.notfinite_count, 1)),
        last_finite=finite,
        total_notfinite=_next(state.total_notfinite, jnp.where(finite, 0, 1)),
        step=_next(state.step, 1),
        loss_scale=state.loss_scale.adjust(finite),
        at_floor=~finite & _was_at_floor(state.loss_scale),
    )


def _next(count: Any, more: Any) -> Any:
    """Returns a counter after so many more, which stops at its largest value."""
    return count + jnp.where(count < _MOST, more, 0)


def _was_at_floor(scale: Any) -> Any:
    if not isinstance(scale, DynamicLossScale):
        return jnp.bool_(False)
    return scale.at_floor & (scale.overflows + 1 >= LossScale.of(scale.rule).hysteresis)


def _checked_limit(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
        raise UsageError(
            "apply_if_finite needs max_consecutive_errors to be a whole number from 1 to "
            f"2**31 - 1, got {value!r}. Leave it out for no limit."
        )
    return value
