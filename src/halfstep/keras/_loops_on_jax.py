"""What loops on JAX do, inside of `jax.jit` and `jax.grad` too."""

import atexit
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import keras

from halfstep.core import emit
from halfstep.keras import _loops
from halfstep.keras._patches import Undo
from halfstep.keras._private import jax
from halfstep.keras._readings import Reading, number
from halfstep.keras._watch import tell_steps


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
        jax.debug.callback(_emit_loss, keras.ops.mean(value))

    def steps(self, optimizer: Any, before: Reading, after: Reading) -> None:
        """Tells about a step, when it is taken."""
        count = len(astuple(before))

        def tell(*values: Any) -> None:
            tell_steps(optimizer, Reading(*values[:count]), Reading(*values[count:]))

        jax.debug.callback(tell, *astuple(before), *astuple(after))


def _emit_loss(value: Any) -> None:
    emit("loss", value=float(value), source="keras")
