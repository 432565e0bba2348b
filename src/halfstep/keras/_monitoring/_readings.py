"""What an optimizer counted up to now, in the middle of `fit` on any backend."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy

from halfstep.core import Culprits
from halfstep.keras._loss_scale_optimizer import LossScaleOptimizer
from halfstep.keras._optimizers import optimizers_of, was_asked
from halfstep.keras._stepping._backend import backend


@dataclass(frozen=True)
class Reading:
    """The counts of an optimizer at one moment."""

    steps: int
    skipped: int
    scale: float


class Source:
    """An optimizer that never skips: its scale is constant.

    Args:
        model: The model in `fit`.
        optimizer: It.
    """

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer

    def asked(self) -> bool:
        """Returns whether the optimizer was ever asked for a step; waits for the device."""
        return was_asked(self.optimizer, self.current())

    def read(self, batches: int) -> Reading:
        """Returns the counts; waits for the device.

        Args:
            batches: How many batches the monitor saw.
        """
        factor = getattr(self.optimizer, "loss_scale_factor", None)
        return Reading(batches, 0, 1.0 if factor is None else float(factor))

    def culprits(self) -> Culprits:
        """Returns whose gradients were not finite since the last call."""
        return ()

    def current(self) -> Callable[[Any], Any]:
        """Returns a function from a variable of the optimizer to its value now."""
        return _value_in(self.model, self.optimizer)

    def host(self, variable: Any) -> Any:
        """Returns the numbers of a variable of the optimizer on the host."""
        return backend().host(self.current()(variable))


class OurSource(Source):
    """Our loss-scale optimizer, which counts by itself."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self._before: Any = self._found() if self.optimizer.built else 0

    def read(self, batches: int) -> Reading:
        """Returns the counts of the optimizer's whole life."""
        if not self.optimizer.built:
            return Reading(0, 0, self.optimizer.counts.scale)
        counts = self.optimizer._cell.counts(self.current())
        return Reading(counts.steps, counts.skipped, counts.scale)

    def culprits(self) -> Culprits:
        """Returns whose gradients were not finite since the last call, and what they held."""
        if not self.optimizer.built:
            return ()
        before, self._before = self._before, self._found()
        named: Culprits = self.optimizer._tally.culprits(self._before - before)
        return named

    def _found(self) -> Any:
        return numpy.asarray(self.host(self.optimizer._tally.found))


class KerasSource(Source):
    """Keras' own loss-scale optimizer, whose `iterations` leave skipped steps out."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__(model, optimizer)
        self._start = self._iterations() if self.optimizer.built else 0

    def read(self, batches: int) -> Reading:
        """Returns the batches as steps; those without an iteration were skipped."""
        if not self.optimizer.built:
            return Reading(0, 0, float(self.optimizer.initial_scale))
        taken = self._iterations() - self._start
        scale = self.host(self.optimizer.dynamic_scale)
        return Reading(batches, max(0, batches - taken), float(scale))

    def _iterations(self) -> int:
        return int(self.host(self.optimizer.iterations))


class Several:
    """The optimizers of a model that has more than the one it was compiled with.

    Args:
        sources: What reads each.
    """

    def __init__(self, sources: list[Source]) -> None:
        self._sources = sources

    def read(self, batches: int) -> Reading:
        """Returns the sums of the counts, and the lowest scale, of those asked for a step.

        Args:
            batches: How many batches the monitor saw.
        """
        asked = [each for each in self._sources if each.asked()]
        found = [each.read(batches) for each in asked] or [each.read(0) for each in self._sources]
        counts = [(each.steps, each.skipped) for each in found]
        steps, skipped = map(sum, zip(*counts, strict=True))
        return Reading(steps, skipped, min(each.scale for each in found))

    def culprits(self) -> Culprits:
        """Returns whose gradients were not finite since the last call, and what they held."""
        return tuple(itertools.chain.from_iterable(each.culprits() for each in self._sources))


def source_of(model: Any) -> Source | Several:
    """Returns what reads the counts of the optimizers of a model."""
    # The trainer of JAX hands no other optimizer from step to step.
    alone = keras.config.backend() == "jax"
    found = [model.optimizer] if alone else list(optimizers_of(model).values())
    sources = [_kind(each)(model, each) for each in found]
    return sources[0] if len(sources) == 1 else Several(sources)


def _kind(optimizer: Any) -> type[Source]:
    kinds = {LossScaleOptimizer: OurSource, keras.optimizers.LossScaleOptimizer: KerasSource}
    return next((kinds[each] for each in kinds if isinstance(optimizer, each)), Source)


def _value_in(model: Any, optimizer: Any) -> Callable[[Any], Any]:
    """Returns a function from a variable of the optimizer to its value."""
    # Between two batches on JAX, the values are here and not in the variables. Callback.model
    # would put them there, and take them out again, for the whole model.
    state = getattr(model, "_jax_state", None)
    if not state or model._jax_state_synced:
        return lambda variable: variable.value
    pairs = zip(optimizer.variables, state["optimizer_variables"], strict=True)
    by_id = {id(variable): value for variable, value in pairs}
    return lambda variable: by_id[id(variable)]
