"""Runs what a script has compiled again, without being compiled, to see what is called in it."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras

from halfstep.core import quiet
from halfstep.keras._batches import Values
from halfstep.keras._loops import untold
from halfstep.keras._patches import Undo
from halfstep.keras._returned import running_again

_BACKENDS = {"jax": "_again_on_jax", "tensorflow": "_again_on_tensorflow"}
_EVENTS = ("backward", "loss", "step", "update", "scale", "region", "metric")


@dataclass
class Compiled:
    """A call of a compiled function.

    Args:
        function: It, as it was written.
        args: What it was called with.
        kwargs: The same by name.
        values: Variables with their values before.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    values: Values = field(default_factory=list)

    def again(self) -> None:
        """Runs it once more, and changes no variable; where that ends early, so be it."""
        with contextlib.ExitStack() as stack:
            # Of all that it does, only the calls of models and gradients matter, which come first.
            stack.enter_context(contextlib.suppress(Exception))
            for each in (quiet(*_EVENTS), untold(), running_again(), uncompiled()):
                stack.enter_context(each)
            stack.enter_context(keras.StatelessScope(self.values))
            self.function(*self.args, **self.kwargs)


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Lets compiled functions run as they were written until the block ends."""
    found = _here()
    return contextlib.nullcontext() if found is None else found.uncompiled()


def install(keep: Callable[[Compiled], None], tell: Callable[[Any], None]) -> Iterator[Undo]:
    """Yields what undoes each change that lets calls of compiled functions be kept.

    Args:
        keep: Learns of each call before it runs.
        tell: Called after it, with what it returned.
    """
    found = _here()
    if found is not None:
        yield from found.install(keep, tell)


def _here() -> Any:
    name = _BACKENDS.get(keras.config.backend())
    return importlib.import_module(f"halfstep.keras.{name}") if name else None
