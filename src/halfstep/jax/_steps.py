"""What a script calls of `jax.jit` and `jax.grad`, seen without changing a number."""

import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from halfstep.core import replace

Undo = Callable[[], None]
_DONATING = ("donate_argnums", "donate_argnames")
# What else a jitted function has.
_MORE = ("lower", "trace", "eval_shape", "clear_cache", "_cache_size")


@dataclass(eq=False)
class Function:
    """A function that was given to JAX.

    Args:
        function: It.
        options: What `diagnose` is to be told of it.
        takes_gradients: Whether gradients are taken in it, or of it.
        calls: How often it was called from outside of every other one.
    """

    function: Callable[..., Any]
    options: dict[str, Any]
    takes_gradients: bool = False
    calls: int = 0


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function that takes gradients.

    Args:
        called: The function.
        args: What it was called with.
        kwargs: The same by name.
        result: What it returned.
    """

    called: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class _Local(threading.local):
    outermost: Function | None = None


class Steps:
    """Tells of each call of a function that takes gradients, of the one that is called the most.

    Args:
        taken: Receives the calls.

    Example:
        >>> steps = Steps(lambda call: print(call.called.function.__name__, float(call.result)))
        >>> end = steps.start()
        >>> @jax.jit
        ... def slope(x):
        ...     return jax.grad(lambda x: x * x)(x)
        >>> _ = slope(3.0)
        slope 6.0
        >>> end()
        >>> _ = slope(3.0)
    """

    def __init__(self, taken: Callable[[Call], None]) -> None:
        self._taken = taken
        self._active = False
        self._local = _Local()
        self._main: Function | None = None
        self.donated = False

    def start(self) -> Undo:
        """Begins to watch, and returns what ends it."""
        undo = list(self._install())
        self._active = True

        def end() -> None:
            self._active = False
            while undo:
                undo.pop()()

        return end

    def unseen(self) -> "_Unseen":
        """Returns a block in which nothing is told of."""
        return _Unseen(self._local)

    def _install(self) -> Iterator[Undo]:
        yield replace(jax, "jit", self._jit)
        for name in ("grad", "value_and_grad"):
            yield replace(jax, name, self._grad)

    def _jit(self, original: Any, *functions: Any, **options: Any) -> Any:
        if not functions:
            return lambda function: self._jit(original, function, **options)
        # What is looked at later must still be there.
        kept = {name: value for name, value in options.items() if name not in _DONATING}
        self.donated |= any(options.get(name) not in (None, (), []) for name in _DONATING)
        made = original(*functions, **kept)
        return self._watched(Function(functions[0], {}), made)

    def _grad(
        self, original: Any, function: Any, argnums: Any = 0, *args: Any, **options: Any
    ) -> Any:
        made = original(function, argnums, *args, **options)
        known = {"argnums": argnums}
        return self._watched(Function(function, known, takes_gradients=True), made)

    def _watched(self, called: Function, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(called, made, args, kwargs)

        for name in _MORE:
            if hasattr(made, name):
                setattr(call, name, getattr(made, name))
        return call

    def _call(self, called: Function, made: Any, args: Any, kwargs: Any) -> Any:
        local = self._local
        if local.outermost is not None:
            local.outermost.takes_gradients |= called.takes_gradients
        if not self._active or local.outermost is not None or _is_traced(args, kwargs):
            return made(*args, **kwargs)
        local.outermost = called
        try:
            result = made(*args, **kwargs)
        finally:
            local.outermost = None
        if called.takes_gradients:
            with self.unseen():
                self._took(Call(called, args, kwargs, result))
        return result

    def _took(self, call: Call) -> None:
        call.called.calls += 1
        if self._main is None or call.called.calls > self._main.calls:
            self._main = call.called
        if self._main is call.called:
            self._taken(call)


class _Unseen:
    """A block in which calls are part of another one."""

    def __init__(self, local: _Local) -> None:
        self._local = local

    def __enter__(self) -> None:
        self._before = self._local.outermost
        self._local.outermost = Function(lambda: None, {})

    def __exit__(self, *_: object) -> None:
        self._local.outermost = self._before


def _is_traced(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
