"""Calls of what JAX has compiled, or takes gradients of."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from halfstep.core import replace
from halfstep.keras._again import Compiled
from halfstep.keras._calls import is_traced
from halfstep.keras._loops_on_jax import telling
from halfstep.keras._patches import Undo
from halfstep.keras._returned import Enough
from halfstep.keras._returned_on_jax import following
from halfstep.keras._watch import inside

jax = import_module("jax")  # in which functions are replaced, and not in Keras' name for it
_DONATING = ("donate_argnums", "donate_argnames")


class _Local(threading.local):
    depth = 0
    again = False


_local = _Local()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Lets functions run as they were written until gradients are taken, or the block ends."""
    _local.again = True
    try:
        with jax.disable_jit():
            yield
    finally:
        _local.again = False


def install(keep: Callable[[Compiled], None], tell: Callable[[Any], None]) -> Iterator[Undo]:
    """Yields what undoes each change that lets calls of compiled functions be kept.

    What they tell of waits until they have run, as nothing can be computed meanwhile.

    Args:
        keep: Learns of each call before it runs.
        tell: Called after it, with what it returned.
    """
    yield replace(jax, "jit", functools.partial(_jit, keep, tell))
    for name in ("grad", "value_and_grad"):
        yield replace(jax, name, functools.partial(_grad, keep, tell))
    yield telling.later()


def _jit(keep: Any, tell: Any, original: Any, *functions: Any, **options: Any) -> Any:
    if not functions:
        return lambda function: _jit(keep, tell, original, function, **options)
    kept = {name: value for name, value in options.items() if name not in _DONATING}
    made = original(*functions, **kept)

    def call(*given: Any, **named: Any) -> Any:
        return _call(keep, tell, functions[0], made, *given, **named)

    return functools.wraps(made)(call)


def _grad(keep: Any, tell: Any, original: Any, function: Any, *args: Any, **options: Any) -> Any:
    made = original(function, *args, **options)

    def call(*given: Any, **named: Any) -> Any:
        if _local.again:
            with following():
                function(*given, **named)
                made(*given, **named)
            raise Enough
        # What runs again is to take gradients.
        return _call(keep, tell, wrapped, made, *given, **named)

    wrapped = functools.wraps(made)(call)
    return wrapped


def _call(keep: Any, tell: Any, function: Any, made: Any, *args: Any, **kwargs: Any) -> Any:
    if _local.depth or inside.step or is_traced((args, kwargs)):
        return made(*args, **kwargs)
    keep(Compiled(function, args, kwargs))
    _local.depth += 1
    try:
        result = made(*args, **kwargs)
    finally:
        _local.depth -= 1
    tell(result)
    return result
