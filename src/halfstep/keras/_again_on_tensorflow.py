"""Calls of what `tf.function` has compiled."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from halfstep.core import replace
from halfstep.keras._again import Compiled
from halfstep.keras._patches import Undo
from halfstep.keras._private import tensorflow as tf
from halfstep.keras._watch import inside


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Lets compiled functions run as they were written until the block ends."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def install(keep: Callable[[Compiled], None], tell: Callable[[Any], None]) -> Iterator[Undo]:
    """Yields what undoes each change that lets calls of compiled functions be kept.

    Args:
        keep: Learns of each call before it runs.
        tell: Called after it, with what it returned.
    """

    def call(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if inside.step or tf.inside_function():
            return original(function, *args, **kwargs)
        keep(Compiled(function.python_function, args, kwargs))
        result = original(function, *args, **kwargs)
        tell(result)
        return result

    yield replace(type(tf.function(lambda: None)), "__call__", call)
