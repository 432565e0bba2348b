"""What loops on TensorFlow do, inside of `tf.function` too."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from halfstep.core import emit, replace
from halfstep.keras import _loops
from halfstep.keras._patches import Undo
from halfstep.keras._private import tensorflow as tf
from halfstep.keras._readings import Reading, first_reading, reading
from halfstep.keras._watch import inside, tell_steps


class _Local(threading.local):
    scaled = False  # since the last step, so that a tape takes gradients of a scaled loss


class Loop(_loops.Loop):
    """Looks at the optimizers after each compiled function, which stays as it is but for a loss."""

    def __init__(self) -> None:
        # With what each had come to when it became known.
        self._optimizers: weakref.WeakKeyDictionary[Any, Reading] = weakref.WeakKeyDictionary()
        self._kept: Any = None
        self._local = _Local()

    def install(self) -> Iterator[Undo]:
        """Looks where a tape takes gradients, and where compiled functions are called."""
        yield replace(tf.GradientTape, "gradient", self._gradient)
        yield replace(type(tf.function(lambda: None)), "__call__", self._call)

    def read(self, value: Any) -> Any:
        """Returns a value, 0 inside of a function that is traced."""
        return 0.0 if tf.inside_function() else super().read(value)

    def loss(self, value: Any) -> None:
        """Tells about a loss that is to be scaled."""
        self._local.scaled = True
        self._tell(value)

    def steps(self, optimizer: Any, before: Reading, after: Reading) -> None:
        """Tells about a step; one that is traced, after the function."""
        self._local.scaled = False
        if not tf.inside_function():
            tell_steps(optimizer, before, after)
        with tf.init_scope():
            self._optimizers.setdefault(optimizer, _known_now(optimizer))

    def _gradient(
        self, original: Callable[..., Any], tape: Any, target: Any, *args: Any, **kwargs: Any
    ) -> Any:
        told = inside.step or self._local.scaled
        if not told and tf.is_tensor(target) and target.shape.rank == 0:
            self._tell(target)
        return original(tape, target, *args, **kwargs)

    def _tell(self, value: Any) -> None:
        if not tf.inside_function():
            super().loss(value)
        elif not tf.distribute.has_strategy():
            self._variable().assign(tf.stack([tf.reduce_mean(tf.cast(value, tf.float32)), 1.0]))

    def _variable(self) -> Any:
        """Returns the last loss of a compiled function, and whether there was one."""
        if self._kept is None:
            with tf.init_scope():
                self._kept = tf.Variable([0.0, 0.0], trainable=False)
        return self._kept

    def _call(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.step or tf.inside_function():
            return original(function, *args, **kwargs)
        before = {id(each): reading(each) for each in list(self._optimizers)}
        result = original(function, *args, **kwargs)
        self._tell_kept()
        for each, first in list(self._optimizers.items()):
            known, after = before.get(id(each), first), reading(each)
            if known != after:
                tell_steps(each, known, after)
        return result

    def _tell_kept(self) -> None:
        if self._kept is None:
            return
        value, told = self._kept.numpy()
        if told:
            emit("loss", value=float(value), source="keras")
            self._kept.assign([0.0, 0.0])


def _known_now(optimizer: Any) -> Reading:
    """Returns what an optimizer has come to; one that is being built has come to nothing."""
    # What a traced function creates has no value before the function runs.
    if all(each.value.is_initialized() for each in optimizer.variables):
        return reading(optimizer)
    return first_reading(optimizer)
