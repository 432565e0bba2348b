"""jmp's dynamic loss scale, as another view of the one transition."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from halfstep import core
from halfstep.errors import ScaleError, UsageError
from halfstep.jax._finite import one_boolean
from halfstep.jax._flax import tell_flax
from halfstep.jax._scale import (
    SMALLEST,
    NoOpLossScale,
    Scaling,
    StaticLossScale,
    checked_scale,
)
from halfstep.jax._transition import Arrays, next_state

_DATA = ("loss_scale", "counter")
_META = ("period", "factor", "min_loss_scale")


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class DynamicLossScale(Scaling):
    """A scale that is multiplied after `period` finite steps and divided after an overflow.

    The scale and the counter are leaves, in float32 and int32 whatever they were given in; the
    rest belongs to the structure, the floor included.

    Args:
        loss_scale: The current scale.
        counter: Finite steps since it last changed.
        period: How many finite steps in a row it takes to grow.
        factor: What the scale is multiplied or divided by.
        min_loss_scale: The floor: no sequence of overflows leads below it.

    Raises:
        ScaleError: If the scale could destroy a run.
        UsageError: If the floor is only known while a compiled function runs.

    Example:
        >>> import jax
        >>> loss_scale = DynamicLossScale(1024, min_loss_scale=1000.0)
        >>> halve = jax.jit(lambda loss_scale: loss_scale.adjust(False))
        >>> halve(halve(loss_scale)).loss_scale.item()
        1000.0
    """

    loss_scale: Any
    counter: Any = 0
    period: int = 2000
    factor: int | float = 2
    min_loss_scale: Any = 1.0

    def __post_init__(self) -> None:
        floor = _checked_floor(self.min_loss_scale)
        object.__setattr__(self, "min_loss_scale", floor)
        scale = checked_scale("DynamicLossScale", self.loss_scale)
        object.__setattr__(self, "loss_scale", scale)
        object.__setattr__(self, "counter", jnp.asarray(self.counter).astype(jnp.int32))
        self._rule()
        tell_flax(DynamicLossScale)

    def _rule(self) -> core.LossScale:
        # jmp takes 20.0 for a period as well.
        whole = int(self.period) == self.period
        floor = max(self.min_loss_scale, SMALLEST)
        return core.LossScale(
            init_scale=floor,
            min_scale=floor,
            growth_interval=int(self.period) if whole else self.period,
            growth_factor=self.factor,
            backoff_factor=1.0 / self.factor if self.factor else self.factor,
        )

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the scale after a step whose gradients were, or were not, finite.

        Args:
            grads_finite: One boolean, as `all_finite` returns.

        Raises:
            NotScalarError: If it is not one boolean.
        """
        finite = one_boolean("adjust", grads_finite)
        before = Arrays(self.loss_scale, self.counter, jnp.int32(0))
        after = next_state(self._rule(), before, finite)
        meta = tuple(getattr(self, name) for name in _META)
        return DynamicLossScale.tree_unflatten(meta, (after.scale, after.finite_steps))

    def tree_flatten(self) -> tuple[Any, ...]:
        """Returns the leaves and the structure."""
        return tuple(tuple(getattr(self, name) for name in names) for names in (_DATA, _META))

    def tree_flatten_with_keys(self) -> tuple[Any, ...]:
        """Returns the leaves with their names, and the structure."""
        data, meta = self.tree_flatten()
        return tuple(zip(map(jax.tree_util.GetAttrKey, _DATA), data, strict=True)), meta

    @classmethod
    def tree_unflatten(cls, meta: tuple[Any, ...], data: Any) -> "DynamicLossScale":
        """Returns the scale with these leaves, whatever they are, and this structure."""
        value = object.__new__(cls)
        for name, content in zip((*_DATA, *_META), (*data, *meta), strict=True):
            object.__setattr__(value, name, content)
        tell_flax(cls)
        return value


def _checked_floor(value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise UsageError(
            f"DynamicLossScale needs a min_loss_scale that is known while tracing, got {value}. "
            "Create the loss scale outside of the transformed function."
        )
    floor = jnp.asarray(value).astype(jnp.float32).item()
    if not 0.0 <= floor < float("inf"):
        raise ScaleError(
            f"DynamicLossScale needs a finite min_loss_scale of at least 0, got {value!r}. "
            "Write for example 1.0."
        )
    return floor


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
