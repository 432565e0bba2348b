"""Loss scales: frozen trees that are handed from one step to the next."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp

from halfstep.core import LossScale, ScaleState
from halfstep.errors import ScaleError, UsageError
from halfstep.jax._finite import one_boolean
from halfstep.jax._flax import tell_flax
from halfstep.jax._numbers import is_number, wide
from halfstep.jax._transition import Arrays, next_state

Tree = TypeVar("Tree")
Rule = LossScale | str | Mapping[str, Any]

# The reciprocal of any smaller scale is not a finite float32.
SMALLEST = 2.0**-126


def multiplied(tree: Tree, scale: Any) -> Tree:
    """Returns each number of a tree times the scale, at least in float32."""

    def times(leaf: Any) -> Any:
        return wide(leaf) * jnp.asarray(scale).astype(wide(leaf).dtype)

    return jax.tree.map(lambda leaf: times(leaf) if is_number(leaf) else leaf, tree)


def divided(tree: Tree, scale: Any) -> Tree:
    """Returns each number of a tree over the scale, at least in float32."""
    scale = jnp.asarray(scale).astype(jnp.float32)
    # The reciprocal of a scale near the top of float32 is subnormal, which devices take for zero;
    # a product of two factors would be, too, because compilers multiply them beforehand.
    large = scale > 2.0**64
    inverse = 1.0 / jnp.where(large, scale * 2.0**-64, scale)

    def over(leaf: Any) -> Any:
        leaf = wide(leaf)
        return jnp.where(large, leaf * 2.0**-64, leaf) * inverse.astype(leaf.dtype)

    return jax.tree.map(lambda leaf: over(leaf) if is_number(leaf) else leaf, tree)


def checked_scale(thing: str, value: Any) -> Any:
    """Returns a scale as one float32 array; its value is checked where it is known."""
    scale = jnp.asarray(value).astype(jnp.float32)
    if isinstance(scale, jax.core.Tracer):
        return scale
    if not all(SMALLEST <= number < math.inf for number in scale.ravel().tolist()):
        raise ScaleError(
            f"{thing} needs a finite scale of at least 2**-126, got {value!r}. "
            "Write for example 2.0**15."
        )
    return scale


class Scaling:
    """What every loss scale does with trees, by its `loss_scale`."""

    loss_scale: Any

    def scale(self, tree: Tree) -> Tree:
        """Returns the tree times the scale, at least in float32."""
        return multiplied(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Returns the tree over the scale, at least in float32."""
        return divided(tree, self.loss_scale)


@jax.tree_util.register_static
@dataclass(frozen=True)
class NoOpLossScale:
    """No loss scale: the null object for bfloat16 and float32.

    Example:
        >>> NoOpLossScale().scale({"loss": 2.0})
        {'loss': 2.0}
    """

    def __post_init__(self) -> None:
        tell_flax(NoOpLossScale)

    @property
    def loss_scale(self) -> int:
        """The scale, which is 1."""
        return 1

    def scale(self, tree: Tree) -> Tree:
        """Returns the tree as it is."""
        return tree

    def unscale(self, tree: Tree) -> Tree:
        """Returns the tree as it is."""
        return tree

    def adjust(self, grads_finite: Any) -> Self:
        """Returns itself."""
        del grads_finite
        return self


@jax.tree_util.register_static
@dataclass(frozen=True)
class StaticLossScale(Scaling):
    """A scale that never changes.

    Args:
        loss_scale: What the loss is multiplied by.

    Raises:
        ScaleError: If the scale is not positive, or its reciprocal is no normal float32.
        UsageError: If the scale is only known while a compiled function runs.

    Example:
        >>> StaticLossScale(1024.0).unscale(2048.0).item()
        2.0
    """

    loss_scale: float

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, jax.core.Tracer):
            raise UsageError(
                "StaticLossScale needs a number that is known while tracing, got "
                f"{self.loss_scale}. Create it outside of the transformed function."
            )
        known = checked_scale("StaticLossScale", self.loss_scale).item()
        if known > 1.0 / SMALLEST:
            raise ScaleError(
                f"StaticLossScale needs a scale of at most 2**126, got {known!r}. "
                "Write for example 2.0**15."
            )
        object.__setattr__(self, "loss_scale", known)
        tell_flax(StaticLossScale)

    def adjust(self, grads_finite: Any) -> Self:
        """Returns itself."""
        del grads_finite
        return self


@dataclass(frozen=True)
class DynamicLossScale(Scaling):
    """A scale that grows while gradients stay finite, and backs off when one does not.

    A tree of three arrays, a float32 and two int32; the rule belongs to its structure. So it goes
    through `jit`, `vmap`, `scan`, checkpoints and pickles, and is compiled once.

    Args:
        rule: How the scale changes: a `halfstep.LossScale` or its text form.
        loss_scale: The current scale, by default the rule's `init_scale`.
        finite_steps: Steps in a row whose gradients were finite.
        overflows: Overflows since the last growth, counted up to the hysteresis.

    Raises:
        ScaleError: If the scale could destroy a run.

    Example:
        >>> import jax.numpy as jnp
        >>> from halfstep.jax import all_finite
        >>> loss_scale = DynamicLossScale("dynamic(init_scale=8.0)")
        >>> loss_scale.scale(jnp.float16(30000.0)).item()
        240000.0
        >>> grads = loss_scale.unscale({"w": jnp.array([16.0, jnp.inf])})
        >>> loss_scale.adjust(all_finite(grads)).state
        ScaleState(scale=4.0, finite_steps=0, overflows=1)
    """

    rule: Rule = LossScale()  # noqa: RUF009 - it is frozen
    loss_scale: Any = None
    finite_steps: Any = 0
    overflows: Any = 0

    def __post_init__(self) -> None:
        rule = LossScale.of(self.rule)
        given = rule.init_scale if self.loss_scale is None else self.loss_scale
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "loss_scale", checked_scale("DynamicLossScale", given))
        for name in ("finite_steps", "overflows"):
            count = jnp.asarray(getattr(self, name)).astype(jnp.int32)
            object.__setattr__(self, name, count)
        tell_flax(DynamicLossScale)

    @property
    def state(self) -> ScaleState:
        """The numbers on the host; reading them waits for the device."""
        return ScaleState(*(leaf.tolist() for leaf in jax.device_get(jax.tree.leaves(self))))

    @property
    def at_floor(self) -> jax.Array:
        """Whether the scale backs off but can go no lower, on the device."""
        rule = LossScale.of(self.rule)
        return jnp.logical_and(rule.backoff_factor < 1.0, self.loss_scale <= rule.min_scale)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the scale after a step.

        Args:
            grads_finite: Whether its gradients were finite, as `all_finite` tells.

        Raises:
            NotScalarError: If it is not one boolean.
        """
        finite = one_boolean("adjust", grads_finite)
        before = Arrays(self.loss_scale, self.finite_steps, self.overflows)
        rule = LossScale.of(self.rule)
        return _unflatten(rule, next_state(rule, before, finite))


_LEAVES = ("loss_scale", "finite_steps", "overflows")


def _flatten(value: DynamicLossScale) -> tuple[tuple[Any, ...], Any]:
    return tuple(getattr(value, name) for name in _LEAVES), value.rule


def _flatten_with_keys(value: DynamicLossScale) -> tuple[tuple[Any, ...], Any]:
    keys = map(jax.tree_util.GetAttrKey, _LEAVES)
    return tuple(zip(keys, _flatten(value)[0], strict=True)), value.rule


def _unflatten(rule: Any, leaves: Any) -> DynamicLossScale:
    # Transformations put other things than numbers into a tree, which nobody may convert.
    value = object.__new__(DynamicLossScale)
    for name, leaf in zip(("rule", *_LEAVES), (rule, *leaves), strict=True):
        object.__setattr__(value, name, leaf)
    tell_flax(DynamicLossScale)
    return value


jax.tree_util.register_pytree_with_keys(DynamicLossScale, _flatten_with_keys, _unflatten, _flatten)


@runtime_checkable
class AnyLossScale(Protocol):
    """What the loss scales have in common, those of `halfstep.jax.jmp` included."""

    def scale(self, tree: Tree) -> Tree:
        """Returns the tree times the scale."""

    def unscale(self, tree: Tree) -> Tree:
        """Returns the tree over the scale."""

    def adjust(self, grads_finite: Any) -> Self:
        """Returns the scale after a step."""


def loss_scale(value: Rule | AnyLossScale | None = "dynamic") -> Any:
    """Returns the loss scale for a rule, in the smallest form that can hold it.

    Args:
        value: A `halfstep.LossScale`, its text or dict form, None for no scale, or an object that
            already scales, unscales and adjusts.

    Example:
        >>> loss_scale("static(1024.0)")
        StaticLossScale(loss_scale=1024.0)
        >>> loss_scale("none")
        NoOpLossScale()
        >>> loss_scale("dynamic(growth_interval=500)").rule.growth_interval
        500
    """
    if isinstance(value, AnyLossScale):
        return value
    rule = LossScale.none() if value is None else LossScale.of(value)
    return _FORMS[rule.kind](rule)


_FORMS = {
    "none": lambda rule: NoOpLossScale(),
    "static": lambda rule: StaticLossScale(rule.init_scale),
    "dynamic": DynamicLossScale,
}
