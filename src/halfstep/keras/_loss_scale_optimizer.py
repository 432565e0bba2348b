"""The loss-scale optimizer of Keras, with a scale that cannot destroy a run."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from halfstep.core import Culprits, LossScale
from halfstep.keras._master_optimizer import MasterOptimizer
from halfstep.keras._stepping import _settings, _skips
from halfstep.keras._stepping._arguments import refuse_wrapped, variables_for
from halfstep.keras._stepping._backend import backend, untraced
from halfstep.keras._stepping._cell import ScaleCell, with_counters
from halfstep.keras._stepping._gradients import Unscaling
from halfstep.keras._stepping._old_names import OldNames
from halfstep.keras._stepping._skips import StepCounts
from halfstep.keras._stepping._tally import Tally, Witness
from halfstep.keras._stepping._usage import Usage

_DEFAULTS = _settings.DEFAULTS


@keras.saving.register_keras_serializable(package="halfstep")
class LossScaleOptimizer(OldNames, keras.optimizers.LossScaleOptimizer):
    """Trains with a scaled loss: another optimizer gets the true gradients, or no step at all.

    A step whose gradients are not finite leaves the variables, the other optimizer and its
    `iterations` as they are, and counts as skipped.

    Args:
        inner_optimizer: The optimizer that trains; clipping, averages, weight decay and gradient
            accumulation belong to it, and see true gradients.
        initial_scale: The scale before the first step.
        dynamic_growth_steps: How many finite steps in a row it takes for the scale to grow.
        name: The name of the optimizer.
        loss_scale: All settings of the scale as a `halfstep.LossScale` or its text, such as
            `"static(1024.0)"`, instead of the single ones.
        min_scale: The floor: no sequence of overflows leads below it.
        max_scale: The cap: a growth that would exceed it does not happen.
        growth_factor: What the scale is multiplied by when it grows.
        backoff_factor: What the scale is multiplied by after an overflow.
        hysteresis: From which overflow since the last growth on the scale backs off.
        max_consecutive_skips: After how many skipped steps in a row to raise `NonFiniteError`.
        **kwargs: What Keras' own optimizer accepts for the sake of old files.

    Raises:
        ScaleError: If the scale could destroy a run.
        UsageError: If both `loss_scale` and single settings are given.

    Example:
        >>> import keras
        >>> optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
        >>> weight = keras.Variable([1.0])
        >>> optimizer.build([weight])
        >>> float(optimizer.scale_loss(3.0))
        24.0
        >>> optimizer.apply([keras.ops.array([8.0])])
        >>> weight.numpy().tolist()
        [0.5]
        >>> optimizer.counts
        StepCounts(steps=1, skipped=0, consecutive_skips=0, scale=8.0)
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        initial_scale: float = _DEFAULTS["initial_scale"],
        dynamic_growth_steps: int = _DEFAULTS["dynamic_growth_steps"],
        name: str | None = None,
        *,
        loss_scale: LossScale | str | Mapping[str, Any] | None = None,
        min_scale: float = _DEFAULTS["min_scale"],
        max_scale: float = _DEFAULTS["max_scale"],
        growth_factor: float = _DEFAULTS["growth_factor"],
        backoff_factor: float = _DEFAULTS["backoff_factor"],
        hysteresis: int = _DEFAULTS["hysteresis"],
        max_consecutive_skips: int | None = None,
        **kwargs: Any,
    ) -> None:
        given = {
            "initial_scale": initial_scale,
            "dynamic_growth_steps": dynamic_growth_steps,
            "min_scale": min_scale,
            "max_scale": max_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "hysteresis": hysteresis,
        }
        rule = _settings.rule_of(loss_scale, given)
        limit = _settings.checked_limit(max_consecutive_skips)
        refuse_wrapped(inner_optimizer, LossScaleOptimizer, (keras.optimizers.LossScaleOptimizer,))
        super().__init__(inner_optimizer, rule.init_scale, rule.growth_interval, name, **kwargs)
        self.rule, self._usage, self._standstill = rule, Usage(), _skips.Standstill(limit)

    def build(self, var_list: Sequence[Any]) -> None:
        """Creates the variables of both optimizers.

        Args:
            var_list: The variables to train.
        """
        self._cell = ScaleCell(self.rule, self.add_variable)
        self._tally = Tally(self, var_list)
        self.inner_optimizer.build(var_list)
        # Not Keras' own loss-scale optimizer, which would add its variables.
        super(keras.optimizers.LossScaleOptimizer, self).build(var_list)

    @property
    def dynamic_scale(self) -> Any:
        """The variable that holds the scale."""
        self._usage.scaled()
        return self._built_cell().scale

    @property
    def step_counter(self) -> Any:
        """The variable that counts the finite steps since the scale last changed."""
        return self._built_cell().step_counter

    @property
    def loss_scale(self) -> Any:
        """The scale as a float32 tensor, by which a loop may multiply its loss by itself."""
        self._usage.scaled()
        return ops.convert_to_tensor(self._scale(), dtype="float32")

    @property
    def counts(self) -> StepCounts:
        """How many steps were taken and skipped; reading it waits for the device."""
        return self._cell.counts() if self.built else StepCounts(0, 0, 0, self.rule.init_scale)

    @property
    def nonfinite(self) -> Culprits:
        """Whose gradients were not finite so far, and whether they held inf, nan, or both."""
        return self._tally.culprits(self._tally.read()) if self.built else ()

    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the scale, at least in float32.

        Args:
            loss: A tensor or a number.
        """
        self._usage.scaled()
        return ops.multiply(loss, ops.convert_to_tensor(self._scale(), dtype="float32"))

    @untraced
    def apply(self, grads: Sequence[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """Takes a step, or skips it if a gradient is not finite.

        Args:
            grads: Gradients of the scaled loss, one for each variable; None where there is none.
            trainable_variables: Their variables, by default those of `build`.

        Raises:
            UsageError: If gradients do not match the variables.
            NonFiniteError: If the scale can go no lower, or `max_consecutive_skips` is reached,
                where the host knows the outcome: not inside of a compiled function.
        """
        grads = list(grads)
        if not grads:
            return
        variables = variables_for(self, grads, trainable_variables)
        unscaling = self._unscaling(grads, variables)
        true = unscaling.true(grads)
        received = unscaling.received(true)
        finite = unscaling.finite(grads, received)
        outcome = backend().known(finite)
        if outcome is None:
            self._branch(finite, grads, unscaling)
        elif outcome:
            self.inner_optimizer.apply(true, variables)
            self._cell.step(finite=True)
        else:
            self._skip(received)

    def _branch(self, finite: Any, grads: list[Any], unscaling: Unscaling) -> None:
        """Takes or skips a step inside of a compiled function.

        Gradients are divided in there once more: as a part of the update, while the compiler would
        write to memory whatever came in from outside.
        """

        def update(grads: list[Any]) -> None:
            self.inner_optimizer.apply(unscaling.true(grads), unscaling.variables)

        def note() -> None:
            self._tally.note(unscaling.received(unscaling.true(grads)))

        written = [*self.variables, *self._trainable_variables]
        backend().branch(finite, grads, update, Witness(self._cell, note), written)

    def _skip(self, pairs: list[tuple[Any, Any]]) -> None:
        before = self._cell.step(finite=False)
        self._tally.note(pairs)
        names = _skips.culprits(pairs)
        self._standstill.tell(self.counts, names)
        _skips.refuse_floor(self.rule, before, names)

    def check_skips(self) -> None:
        """Speaks about skipped steps inside of compiled functions; waits for the device.

        Raises:
            NonFiniteError: If `max_consecutive_skips` is reached.
        """
        self._standstill.tell(self.counts, self.nonfinite)

    def _unscaling(self, grads: list[Any], variables: list[Any]) -> Unscaling:
        are_true = self._usage.are_unscaled(grads) or self._usage.was_forgotten(self.rule)
        return Unscaling(
            variables,
            None if are_true else self._scale,
            [self._overwrite_variable_with_gradient(variable) for variable in variables],
            rounded=not isinstance(self.inner_optimizer, MasterOptimizer),
        )

    def _scale(self) -> Any:
        return self._cell.scale.value if self.built else self.rule.init_scale

    def _built_cell(self) -> ScaleCell:
        if not self.built:
            raise AttributeError(
                "LossScaleOptimizer has no variables before it is built. Call "
                "optimizer.build(variables), or read optimizer.loss_scale."
            )
        return self._cell

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]]) -> Any:
        """Takes a step with pairs of gradients and variables, and returns `iterations`.

        Args:
            grads_and_vars: The pairs.
        """
        super().apply_gradients(grads_and_vars)
        return self.iterations

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Any
    ) -> tuple[list[Any], list[Any]]:
        """Returns the values after a step, from those before it; for JAX.

        Args:
            optimizer_variables: The values of `variables`.
            grads: Gradients of the scaled loss.
            trainable_variables: The values of the variables to train.

        Returns:
            The new values of the trained variables, and those of the optimizer.
        """
        base: Any = super(keras.optimizers.LossScaleOptimizer, self)
        values: tuple[list[Any], list[Any]] = base.stateless_apply(
            optimizer_variables, grads, trainable_variables
        )
        return values

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """Ends a training, as `fit` does: averages become the weights, and skips are told.

        Args:
            var_list: The variables of the model.
        """
        super().finalize_variable_values(var_list)
        # An error that ends the training may have left the variables without values.
        if self.built and sys.exc_info()[0] is None:
            self._standstill.finish(self.counts, self.nonfinite)

    def exclude_from_weight_decay(self, var_list: Any = None, var_names: Any = None) -> None:
        """Keeps the inner optimizer from decaying some variables.

        Args:
            var_list: Variables of the model.
            var_names: Parts of their names.
        """
        self.inner_optimizer.exclude_from_weight_decay(var_list, var_names)

    def load_own_variables(self, store: Any) -> None:
        """Loads the variables from a file, which Keras' own optimizer may have written.

        Args:
            store: The values by their numbers.
        """
        super().load_own_variables(with_counters(store, self))
        self._standstill.restart(self.counts)

    def get_config(self) -> dict[str, Any]:
        """Returns the settings: those of Keras, and others where they are not the default."""
        limit = self._standstill.limit
        extra = {} if limit is None else {"max_consecutive_skips": limit}
        return {**super().get_config(), **_settings.settings_of(self.rule), **extra}

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> "LossScaleOptimizer":
        """Returns the optimizer of a configuration, which stays as it is.

        Args:
            config: What `get_config` returned, here or in Keras' own optimizer.
            custom_objects: Classes by the names in the configuration.
        """
        optimizer: LossScaleOptimizer = super().from_config(dict(config), custom_objects)
        return optimizer
