"""The state of a loss scale, and what was counted, in variables of an optimizer."""

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy
from keras import ops

from halfstep.core import LossScale, ScaleState
from halfstep.keras._stepping._backend import backend
from halfstep.keras._stepping._skips import StepCounts

# The four numbers of `counters`: overflows, steps, skipped and consecutive_skips.
_STEPS = 1
_AFTER_GROWTH, _AFTER_NONE = (0, 1, 1, 0), (1, 1, 1, 0)
_ONE_STEP = (0, 1, 0, 0)
_TOP = 2**31 - 1


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
        # One variable, because each one costs time in each step.
        self._counters = add_variable(shape=(4,), dtype="int", name="counters")

    def read(self) -> ScaleState:
        """Returns the state on the host."""
        return ScaleState(_host(self.scale), _host(self.step_counter), _host(self._counters)[0])

    def counts(self, current: Callable[[Any], Any] = lambda variable: variable.value) -> StepCounts:
        """Returns what was counted, on the host.

        Args:
            current: From a variable to its value, which is elsewhere in the middle of a training.
        """
        scale, counters = (backend().host(current(each)) for each in (self.scale, self._counters))
        _, steps, skipped, row = counters
        return StepCounts(steps, skipped, row, scale)

    def steps(self, current: Callable[[Any], Any]) -> Any:
        """Returns how many steps it was asked for as a tensor, also of a function that is traced.

        Args:
            current: From a variable to its value.
        """
        return current(self._counters)[_STEPS]

    def step(self, *, finite: bool) -> ScaleState:
        """Counts a step whose outcome the host knows, and returns the state before it."""
        overflows, steps, skipped, row = _host(self._counters)
        before = ScaleState(_host(self.scale), _host(self.step_counter), overflows)
        after = self.rule.next(before, finite=finite)
        if after.scale != before.scale:
            self.scale.assign(after.scale)
        if after.finite_steps != before.finite_steps:
            self.step_counter.assign(after.finite_steps)
        row, skipped = (0, skipped) if finite else (row + 1, skipped + 1)
        self._counters.assign([after.overflows, steps + 1, skipped, row])
        return before

    def grow(self) -> None:
        """Counts a finite step inside of a graph: `LossScale.next` in tensors."""
        rule, scale, counter = self.rule, self.scale.value, self.step_counter.value
        due = ops.greater_equal(counter + 1, rule.growth_interval)
        grown = _product(scale, rule.growth_factor)
        fits = ops.logical_and(due, ops.less_equal(grown, rule.max_scale))
        kept = ops.where(due, self._whole(_AFTER_GROWTH), self._whole(_AFTER_NONE))
        counters = self._counters.value * kept + self._whole(_ONE_STEP)
        self.scale.assign(ops.where(fits, grown, scale))
        self.step_counter.assign(ops.where(due, ops.zeros_like(counter), counter + 1))
        self._counters.assign(counters)

    def back_off(self) -> None:
        """Counts a step that is not finite inside of a graph: `LossScale.next` in tensors."""
        rule, scale = self.rule, self.scale.value
        tops = self._whole((rule.hysteresis, _TOP, _TOP, _TOP))
        counters = ops.minimum(self._counters.value + 1, tops)
        lower = ops.maximum(_product(scale, rule.backoff_factor), rule.min_scale)
        # A scale that was set below the floor stays where it is.
        lower = ops.minimum(lower, scale)
        exhausted = ops.equal(counters[0], rule.hysteresis)
        self.scale.assign(ops.where(exhausted, lower, scale))
        self.step_counter.assign(ops.zeros_like(self.step_counter.value))
        self._counters.assign(counters)

    def _whole(self, numbers: tuple[int, ...]) -> Any:
        return ops.convert_to_tensor(numbers, dtype=self._counters.dtype)


def _product(scale: Any, factor: float) -> Any:
    """Returns the float32 that is nearest to the exact product, as core does."""
    if math.frexp(factor)[0] == 0.5:
        return ops.multiply(scale, factor)
    return backend().wide_product(scale, factor)


def _host(variable: Any) -> Any:
    return backend().host(variable.value)


def with_counters(store: Any, optimizer: Any) -> Any:
    """Returns a file's values, with zeros for what is counted, which Keras' own optimizer lacks."""
    count = len(store.keys())
    if not optimizer.built or count + 2 != len(optimizer.variables):
        return store
    values = [store[str(number)] for number in range(count)]
    own = len(optimizer._variables) - 2
    trained = len(optimizer._trainable_variables)
    values[own:own] = [numpy.zeros(4, "int32"), numpy.zeros((trained, 2), "int32")]
    return {str(number): value for number, value in enumerate(values)}
