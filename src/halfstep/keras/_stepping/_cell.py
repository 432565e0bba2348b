"""The state of a loss scale, and what was counted, in variables of an optimizer."""

import math
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from halfstep.core import LossScale, ScaleState
from halfstep.keras._stepping._backend import backend
from halfstep.keras._stepping._skips import StepCounts

# Keras' own optimizer does not have these.
_COUNTERS = ("overflows", "steps", "skipped", "consecutive_skips")


class ScaleCell:
    """The variables of a loss scale and their transition, on the host and inside of graphs.

    Args:
        rule: How the scale changes.
        add_variable: Creates a variable of the optimizer, as `Optimizer.add_variable` does.
    """

    def __init__(self, rule: LossScale, add_variable: Callable[..., Any]) -> None:
        self.rule = rule
        # The order of Keras' own optimizer, whose weights files can be loaded so.
        self.step_counter = add_variable(shape=(), dtype="int", name="step_counter")
        first = keras.initializers.Constant(rule.init_scale)
        self.scale = add_variable((), initializer=first, dtype="float32", name="dynamic_scale")
        self.overflows, self.steps, self.skipped, self.consecutive_skips = (
            add_variable(shape=(), dtype="int", name=name) for name in _COUNTERS
        )

    def read(self) -> ScaleState:
        """Returns the state on the host."""
        return ScaleState(_number(self.scale), _count(self.step_counter), _count(self.overflows))

    def counts(self) -> StepCounts:
        """Returns what was counted, on the host."""
        steps, skipped, row = map(_count, (self.steps, self.skipped, self.consecutive_skips))
        return StepCounts(steps, skipped, row, _number(self.scale))

    def step(self, *, finite: bool) -> ScaleState:
        """Counts a step whose outcome the host knows, and returns the state before it."""
        before = self.read()
        after = self.rule.next(before, finite=finite)
        for variable, old, new in zip(self._state(), before, after, strict=True):
            if old != new:
                variable.assign(new)
        self.steps.assign_add(1)
        if not finite:
            self.skipped.assign_add(1)
            self.consecutive_skips.assign_add(1)
        elif _count(self.consecutive_skips):
            self.consecutive_skips.assign(0)
        return before

    def grow(self) -> None:
        """Counts a finite step inside of a graph: `LossScale.next` in tensors."""
        rule, scale, counter = self.rule, self.scale.value, self.step_counter.value
        due = ops.greater_equal(counter + 1, rule.growth_interval)
        grown = _product(scale, rule.growth_factor)
        fits = ops.logical_and(due, ops.less_equal(grown, rule.max_scale))
        values = (
            ops.where(fits, grown, scale),
            ops.where(due, ops.zeros_like(counter), counter + 1),
            ops.where(due, ops.zeros_like(counter), self.overflows.value),
        )
        self._assign(values)
        self.consecutive_skips.assign(ops.zeros_like(counter))

    def back_off(self) -> None:
        """Counts a step that is not finite inside of a graph: `LossScale.next` in tensors."""
        rule, scale = self.rule, self.scale.value
        overflows = ops.minimum(self.overflows.value + 1, rule.hysteresis)
        lower = ops.maximum(_product(scale, rule.backoff_factor), rule.min_scale)
        # A scale that was set below the floor stays where it is.
        lower = ops.minimum(lower, scale)
        exhausted = ops.equal(overflows, rule.hysteresis)
        values = (ops.where(exhausted, lower, scale), ops.zeros_like(overflows), overflows)
        self._assign(values)
        self.skipped.assign_add(1)
        self.consecutive_skips.assign_add(1)

    def _assign(self, values: tuple[Any, ...]) -> None:
        for variable, value in zip(self._state(), values, strict=True):
            variable.assign(value)
        self.steps.assign_add(1)

    def _state(self) -> tuple[Any, ...]:
        return self.scale, self.step_counter, self.overflows


def _product(scale: Any, factor: float) -> Any:
    """Returns the float32 that is nearest to the exact product, as core does."""
    if math.frexp(factor)[0] == 0.5:
        return ops.multiply(scale, factor)
    return backend().wide_product(scale, factor)


def _number(variable: Any) -> float:
    return float(ops.convert_to_numpy(variable.value))


def _count(variable: Any) -> int:
    return int(ops.convert_to_numpy(variable.value))


def with_counters(store: Any, optimizer: Any) -> Any:
    """Returns a file's values, with zeros for counters that Keras' own optimizer does not have."""
    count, added = len(store.keys()), len(_COUNTERS)
    if not optimizer.built or count + added != len(optimizer.variables):
        return store
    values = [store[str(number)] for number in range(count)]
    own = len(optimizer._variables) - added
    values[own:own] = [0] * added
    return {str(number): value for number, value in enumerate(values)}
