"""What a script's own loop calls its models and losses with, where the numbers are there."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace as replace_fields
from typing import Any, NamedTuple

import keras
import numpy as np

from halfstep.core import Diagnosis, Ranges, quiet, replace
from halfstep.keras._batches import Values, variables_of
from halfstep.keras._diagnose import case_of, diagnose, diagnosed
from halfstep.keras._diagnosing._numbers import all_numbers
from halfstep.keras._observe import Case
from halfstep.keras._patches import Undo
from halfstep.keras._private import CompileLoss, Layer, jax, tensorflow
from halfstep.keras._ranges import ranges
from halfstep.keras._returned import Returned, install, is_again, watched
from halfstep.keras._watch import inside

_EVENTS = ("backward", "loss", "step", "update", "scale", "region", "metric")
_KEPT_CALLS = 8
# A model may hand out float16 what a loss reads in float32.
_ROUNDING = 1e-2


class Kept(NamedTuple):
    """What a model was called with.

    Args:
        model: The model.
        values: Its variables, with their values before the step.
        inputs: The inputs.
        targets: The targets, None where there are none.
        loss: What compares them, None for what the model was compiled with.
        training: Whether layers were told to run as in training, None where nothing was said.
        outputs: What the model returned, and what the loss was called with; empty for `fit`.
        returned: The gradient that came back to the outputs, None for `fit`.
    """

    model: Any
    values: Values
    inputs: Any
    targets: Any = None
    loss: Any = None
    training: bool | None = None
    outputs: tuple[Any, ...] = ()
    returned: Returned | None = None

    @property
    def whole(self) -> bool:
        """Whether the loss is known, and not only what the model computes."""
        return not self.outputs or (self.loss is not None and _are_same(*self.outputs))

    @property
    def goes_back(self) -> bool:
        """Whether a gradient is known, be it that of the loss or what came back of it."""
        return self.whole or (self.returned is not None and self.returned.known)

    @property
    def entered_broken(self) -> bool:
        """Whether what came back to the model was not finite already."""
        return not self.whole and self.returned is not None and not self.returned.finite

    def diagnosis(self, scale: float) -> Diagnosis:
        """Returns what is wrong with it, forward only where no gradient is known.

        Args:
            scale: What the loss was multiplied by.
        """
        with self._as_before():
            if self.whole:
                return diagnose(*self._given, loss_scale=scale, training=self.training)
            return diagnosed(self._case(scale), (scale,))

    def ranges(self, scale: float) -> Ranges:
        """Returns how its numbers lie in each format, forward only where no gradient is known.

        Args:
            scale: What the loss was multiplied by.
        """
        with self._as_before():
            return ranges(self._case(scale))

    def _case(self, scale: float) -> Case:
        case = case_of(*self._given, self.training)
        if self.whole or self.returned is None or self.entered_broken or not self.returned.known:
            return replace_fields(case, scale=scale)
        loss = self.returned.loss(scale)
        return replace_fields(case, loss=_with_own(self.model, loss), scale=scale)

    @property
    def _given(self) -> tuple[Any, Any, Any, Any]:
        # What `compute_loss` calls belongs to the model.
        loss = None if isinstance(self.loss, CompileLoss) else self.loss
        return self.model, self.inputs, *((self.targets, loss) if self.whole else (None, None))

    @contextlib.contextmanager
    def _as_before(self) -> Iterator[None]:
        with quiet(*_EVENTS), keras.StatelessScope(self.values):
            yield


def _with_own(model: Any, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns a loss with what the layers of a model add to it."""
    return lambda targets, outputs: sum(getattr(model, "losses", ()), loss(targets, outputs))


class _Local(threading.local):
    depth = 0


class Calls:
    """Keeps the calls of models that are not part of another one, with the loss that follows.

    Args:
        traced: Learns of the models that are called while a function is compiled.

    Example:
        >>> calls = Calls(lambda model: None)
        >>> undo = list(calls.install())
        >>> layer = keras.layers.Dense(1)
        >>> outputs = layer(keras.ops.ones((2, 3)))
        >>> loss = keras.losses.MeanSquaredError()(keras.ops.ones((2, 1)), outputs)
        >>> [(each.model is layer, each.whole) for each in calls.kept]
        [(True, True)]
        >>> while undo:
        ...     undo.pop()()
    """

    def __init__(self, traced: Callable[[Any], None]) -> None:
        self.kept: deque[Kept] = deque(maxlen=_KEPT_CALLS)
        self._traced = traced
        self._local = _Local()

    def install(self) -> Iterator[Undo]:
        """Yields what undoes each change."""
        yield replace(Layer, "__call__", self._layer)
        yield replace(Layer, "stateless_call", self._stateless)
        yield from install()
        for owner in (keras.losses.Loss, CompileLoss):
            yield replace(owner, "__call__", self._loss)

    @property
    def paused(self) -> bool:
        """Whether what is called now is no part of the script."""
        return self._local.depth > 0 or is_again()

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Keeps nothing until the block ends."""
        self._local.depth += 1
        try:
            yield
        finally:
            self._local.depth -= 1

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Keeps calls in any case until the block ends."""
        before = self._local.depth, inside.step
        self._local.depth, inside.step = 0, False
        try:
            yield
        finally:
            self._local.depth, inside.step = before

    def _layer(self, original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        if self._local.depth or inside.step or len(args) != 1 or kwargs.get("training") is False:
            return original(layer, *args, **kwargs)
        known = all(each.built for each in layer._flatten_layers())
        values = values_of(layer) if known and not is_traced(args) else []
        with self.unseen():
            outputs = original(layer, *args, **kwargs)
        if is_traced((args, outputs)):
            self._traced(layer)
            return _probed(outputs)
        if layer.trainable_variables:
            values = values or values_of(layer)
            outputs = self._keep(Kept(layer, values, *args, outputs=(outputs,)), kwargs)
        return outputs

    def _keep(self, kept: Kept, options: dict[str, Any]) -> Any:
        """Keeps a call, and returns its outputs."""
        outputs, returned = watched(kept.outputs[0])
        training = options.get("training")
        self.kept.append(kept._replace(training=training, outputs=(outputs,), returned=returned))
        return outputs

    def _stateless(
        self, original: Any, layer: Any, trained: Any, others: Any, *args: Any, **kwargs: Any
    ) -> Any:
        given, seen = (trained, others, args), not (self._local.depth or inside.step)
        with self.unseen() if seen else contextlib.nullcontext():
            result = original(layer, trained, others, *args, **kwargs)
        if not seen or len(args) != 1:
            return result
        if is_traced((given, result)):
            self._traced(layer)
            return (_probed(result[0]), *result[1:])
        values = list(zip(variables_of(layer), (*trained, *others), strict=True))
        kept = Kept(layer, values, *args, outputs=result[:1])
        return (self._keep(kept, kwargs), *result[1:])

    def _loss(
        self, original: Any, loss: Any, targets: Any, outputs: Any, *args: Any, **kw: Any
    ) -> Any:
        last = self.kept[-1] if self.kept else None
        here = not self._local.depth and not inside.step
        if here and last is not None and last.loss is None and not is_traced((targets, outputs)):
            pair = (*last.outputs, outputs)
            self.kept[-1] = last._replace(targets=targets, loss=loss, outputs=pair)
        with self.unseen():
            return original(loss, targets, outputs, *args, **kw)


def _probed(outputs: Any) -> Any:
    """Returns outputs whose gradients are noted, if a function that takes them runs again."""
    if keras.config.backend() != "jax":
        return outputs
    from halfstep.keras._returned_on_jax import probed

    return probed(outputs)


def values_of(model: Any) -> Values:
    """Returns the variables of a model with copies of their values."""
    return [(each, _copied(each.value)) for each in variables_of(model)]


def is_traced(values: Any) -> bool:
    """Returns whether there are no numbers yet, because a function is being compiled."""
    flat = keras.tree.flatten(values)
    if any(isinstance(each, keras.KerasTensor) for each in flat):
        return True
    return _TRACED[keras.config.backend()](flat)


def _copied(value: Any) -> Any:
    return keras.ops.copy(value.detach() if hasattr(value, "detach") else value)


def _are_same(outputs: Any, compared: Any) -> bool:
    """Returns whether a loss was given what a model returned, and not what was made of it."""
    pairs = [[each.values for each in all_numbers(tree)] for tree in (outputs, compared)]
    if list(map(np.shape, pairs[0])) != list(map(np.shape, pairs[1])):
        return False
    with np.errstate(all="ignore"):
        return all(
            np.allclose(a, b, rtol=_ROUNDING, atol=_ROUNDING, equal_nan=True)
            for a, b in zip(*pairs, strict=True)
        )


_TRACED: dict[str, Callable[[list[Any]], bool]] = {
    "jax": lambda flat: any(isinstance(each, jax.core.Tracer) for each in flat),
    # Where it only asks for shapes.
    "torch": lambda flat: any(str(getattr(each, "device", "")) == "meta" for each in flat),
    "tensorflow": lambda flat: tensorflow.inside_function(),
}
