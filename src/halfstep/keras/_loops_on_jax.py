"""What loops on JAX do, inside of `jax.jit` and `jax.grad` too."""

import atexit
import functools
from collections.abc import Callable, Iterator
from dataclasses import astuple
from typing import Any

import keras

from halfstep.core import emit
from halfstep.keras import _loops
from halfstep.keras._patches import Undo
from halfstep.keras._private import jax
from halfstep.keras._readings import Reading, number
from halfstep.keras._watch import tell_steps


class Telling:
    """Tells of what a compiled function has done: at once, or when it is asked to.

    Example:
        >>> waiting = Telling()
        >>> end = waiting.later()
        >>> waiting(print, "told")
        >>> waiting.flush()
        told
        >>> end()
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None

    def __call__(self, tell: Callable[..., None], *values: Any) -> None:
        """Tells of something, or will."""
        if self._waiting is None:
            tell(*values)
        else:
            self._waiting.append((tell, values))

    def later(self) -> Undo:
        """Waits to be asked from now on; returns what ends that."""
        self._waiting = []
        atexit.register(self.flush)

        def end() -> None:
            atexit.unregister(self.flush)
            self.flush()
            self._waiting = None

        return end

    def flush(self) -> None:
        """Tells of what waits, once all functions that were called have run."""
        jax.effects_barrier()
        waiting = self._waiting or []
        while waiting:
            tell, values = waiting.pop(0)
            tell(*values)


telling = Telling()


class Loop(_loops.Loop):
    """Lets a compiled function call back when it runs; its numbers stay as they are."""

    def install(self) -> Iterator[Undo]:
        """Waits at the end for what was not told yet."""
        atexit.register(jax.effects_barrier)
        yield lambda: atexit.unregister(jax.effects_barrier)

    def read(self, value: Any) -> Any:
        """Returns a value, which only has a number once it runs where a function is traced."""
        return value if isinstance(value, jax.core.Tracer) else number(value)

    def loss(self, value: Any) -> None:
        """Tells about a loss, when there is one."""
        jax.debug.callback(functools.partial(telling, _emit_loss), keras.ops.mean(value))

    def steps(self, optimizer: Any, before: Reading, after: Reading) -> None:
        """Tells about a step, when it is taken."""
        count = len(astuple(before))

        def tell(*values: Any) -> None:
            tell_steps(optimizer, Reading(*values[:count]), Reading(*values[count:]))

        counts = (*astuple(before), *astuple(after))
        jax.debug.callback(functools.partial(telling, tell), *counts)


def _emit_loss(value: Any) -> None:
    emit("loss", value=float(value), source="keras")
