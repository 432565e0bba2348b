"""Looks closely at a step of a Keras script, whoever wrote it, by running its model again."""

import inspect
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras

from halfstep.core import Cast, Diagnosis, Ranges, emit
from halfstep.errors import UsageError
from halfstep.keras import _again
from halfstep.keras._again import Compiled
from halfstep.keras._batches import Values, hand_on
from halfstep.keras._calls import Calls, Kept, values_of
from halfstep.keras._diagnosing._numbers import all_numbers, bad
from halfstep.keras._patches import Undo
from halfstep.keras._private import tensorflow as tf

_UNSEEN = (
    "no model of Keras was called in the compiled function. Write halfstep.keras.diagnose(model, "
    "x, y, loss)."
)

_FORWARD_ONLY = (
    "{name} was looked at forward only, because no gradient was seen to come back to it. Write "
    "halfstep.keras.diagnose({name}, x, y, loss) to look at both passes."
)


class Seen(NamedTuple):
    """What a look at the numbers of a step has shown.

    Args:
        ranges: Their magnitudes.
        power: The exponent of the scale that multiplied the gradients.
        casts: What was cast.
    """

    ranges: Ranges
    power: int
    casts: tuple[Cast, ...] = ()


@dataclass
class _Step:
    """What was called in a step.

    Args:
        kept: The calls of models, as far as their numbers were seen.
        compiled: The last call of a compiled function, where models may be called.
    """

    kept: list[Kept] = field(default_factory=list)
    compiled: Compiled | None = None


class Looking:
    """Keeps what the present step of a script calls its models with, and the step before.

    Example:
        >>> looking = Looking()
        >>> end = looking.start()
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="dense")])
        >>> model.layers[0].set_weights([keras.ops.full((4, 1), 1e38), keras.ops.zeros(1)])
        >>> model.compile("sgd", "mse")
        >>> _ = model.fit(keras.ops.ones((2, 4)), keras.ops.ones((2, 1)), verbose=0)
        >>> end()
        >>> fault = looking.faults(scale=1.0).first
        >>> fault.module, fault.operation, fault.phase
        ('dense', 'matmul', 'forward')
    """

    # What the data and the models are like is not looked at.
    derived, sizes, only = False, None, None

    def __init__(self) -> None:
        self._calls = Calls(self._traced)
        self._models: weakref.WeakSet[Any] = weakref.WeakSet()
        self._now, self._before = _Step(), _Step()
        self._calling: set[Any] = set()  # the compiled functions that call models
        self._forward_only: dict[str, None] = {}
        self._both: set[str] = set()

    def start(self) -> Undo:
        """Begins to keep what models are called with, and returns what ends it."""
        undo = list(self._install())

        def end() -> None:
            while undo:
                undo.pop()()

        return end

    def expect(self, *, sampled: bool) -> None:
        """Each step is kept as it was before, whether it is to be looked at or not."""

    def forget(self) -> None:
        """The step is over."""
        if self.has_calls:
            self._now.kept += self._calls.kept
            self._before = self._now
        self._now = _Step()
        self._calls.kept.clear()

    @property
    def has_calls(self) -> bool:
        """Whether a model was called in the step, by `fit` or by the script."""
        return bool(self._now.kept or self._calls.kept or self._now.compiled)

    @property
    def whole(self) -> bool:
        """Whether the loss of each call is known, so that nothing broken comes from elsewhere."""
        return all(each.whole for each in self._kept(self._now))

    @property
    def entered_broken(self) -> bool:
        """Whether what came back to a model was not finite already."""
        return any(each.entered_broken for each in self._kept(self._now))

    @property
    def notes(self) -> Iterator[str]:
        """What there is to say of how steps were looked at."""
        for name in self._forward_only:
            if name not in self._both:
                yield _FORWARD_ONLY.format(name=name)

    def faults(self, scale: float) -> Diagnosis:
        """Returns the first fault of the step in a model, false if there is none.

        Args:
            scale: What the loss was multiplied by.

        Raises:
            UsageError: A compiled function was called, and no call of a model was seen in it.
        """
        with self._calls.unseen():
            kept = self._kept(self._now)
            if not kept:
                raise UsageError(_UNSEEN)
            self._note(kept)
            found = _first(kept, scale)
            return (_is_in_weights(found) and _first(self._kept(self._before), scale)) or found

    def ranges(self, scale: float) -> Seen | None:
        """Returns how the numbers of the largest model lie, None where nothing was kept.

        Args:
            scale: What the loss was multiplied by.
        """
        with self._calls.unseen():
            kept = self._kept(self._now)
            largest = max(kept, key=lambda each: each.model.count_params(), default=None)
            found = Ranges() if largest is None else largest.ranges(scale)
        return Seen(found, math.frexp(scale)[1] - 1) if kept else None

    def _note(self, kept: list[Kept]) -> None:
        """Takes note of which models were looked at forward only."""
        for each in kept:
            if each.goes_back:
                self._both.add(each.model.name)
            else:
                self._forward_only[each.model.name] = None

    def _kept(self, step: _Step) -> list[Kept]:
        """Returns the calls of a step; a compiled function runs once more for that."""
        if step is self._now:
            step.kept += self._calls.kept
            self._calls.kept.clear()
        if not step.kept and step.compiled is not None:
            with self._calls.seen():
                step.compiled.again()
            step.kept += self._calls.kept
            self._calls.kept.clear()
        return step.kept

    def _install(self) -> Iterator[Undo]:
        yield from hand_on(self._keep)
        yield from self._calls.install()
        yield from _again.install(self._keep_compiled, self._tell)

    def _keep(self, model: Any, values: Values, batch: Any) -> None:
        """Keeps a batch of `fit`; what a train step of the model's own does with it, who knows."""
        if type(model).train_step is not keras.Model.train_step:
            self._now.compiled = Compiled(*_train_step(model, values, batch), {}, values)
            return
        inputs, targets, _ = keras.utils.unpack_x_y_sample_weight(batch)
        self._now.kept.append(Kept(model, values, inputs, targets, training=True))

    def _keep_compiled(self, compiled: Compiled) -> None:
        if self._calls.paused:
            return
        self._tell(None)
        compiled.values += [pair for each in list(self._models) for pair in values_of(each)]
        self._now.compiled = compiled

    def _traced(self, model: Any) -> None:
        """Learns that a compiled function calls a model, whose variables it changes afterwards."""
        compiled = self._now.compiled
        if compiled is None:
            return
        self._calling.add(_code(compiled))
        if keras.config.backend() != "tensorflow" or model in self._models:
            return
        self._models.add(model)
        with tf.init_scope():
            if all(each.value.is_initialized() for each in model.variables):
                compiled.values += values_of(model)

    def _tell(self, result: Any) -> None:
        """Tells of what a compiled function has done, if that has to wait until it has run."""
        if keras.config.backend() != "jax" or self._calls.paused:
            return
        # There a loss is not told of, unless it is scaled.
        if self._now.compiled is not None and self._breaks(self._now.compiled, result):
            emit("nonfinite")
        from halfstep.keras._loops_on_jax import telling

        telling.flush()

    def _breaks(self, compiled: Compiled, result: Any) -> bool:
        """Returns whether a compiled function that calls a model made something not finite."""
        broken = _code(compiled) in self._calling and not _finite(result)
        return broken and _finite((compiled.args, compiled.kwargs))


def _code(compiled: Compiled) -> Any:
    return getattr(inspect.unwrap(compiled.function), "__code__", compiled.function)


def _finite(values: Any) -> bool:
    return bad(all_numbers(values)) is None


def _train_step(model: Any, values: Values, batch: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns the train step of a model, and what it is called with."""
    if keras.config.backend() != "jax":
        return model.train_step, (batch,)
    trained = len(model.trainable_variables)
    known = [value for _, value in values]
    # Neither the optimizer nor metrics are reached.
    return model.train_step, ((known[:trained], known[trained:], [], []), batch)


def _first(kept: list[Kept], scale: float) -> Diagnosis:
    return next(filter(None, (each.diagnosis(scale) for each in kept)), Diagnosis())


def _is_in_weights(found: Diagnosis) -> bool:
    """Returns whether a weight was broken already, which a step before has done."""
    first = found.first
    return first is not None and (first.operation, first.role) == ("data", "weight")
