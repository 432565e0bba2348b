"""What a script calls of `jax.jit` and `jax.grad`, seen without changing a number."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from halfstep.core import replace
from halfstep.jax._inner import Enough, Inner, Turn

Undo = Callable[[], None]
_DONATING = ("donate_argnums", "donate_argnames")
# What else a jitted function has.
_MORE = ("lower", "trace", "eval_shape", "clear_cache", "_cache_size")


Loss = Callable[[Any], Any]


@dataclass(eq=False)
class Function:
    """What is known of all functions of the same code that were given to JAX in the same way.

    Args:
        takes_gradients: Whether gradients are taken in it, or of it.
        calls: How often it was called from outside of every other one.
    """

    takes_gradients: bool = False
    calls: int = 0


@dataclass(frozen=True, eq=False)
class Given:
    """A function that was given to JAX.

    Args:
        function: It.
        known: What is known of it.
        options: What `diagnose` is to be told of it.
        loss: Returns the loss in a result; None where it is not known.
    """

    function: Callable[..., Any]
    known: Function
    options: dict[str, Any] = field(default_factory=dict)
    loss: Loss | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a function that takes gradients.

    Args:
        given: The function.
        args: What it was called with.
        kwargs: The same by name.
        result: What it returned.
    """

    given: Given
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None


class _Local(threading.local):
    outermost: Function | None = None
    inner: Inner | None = None  # where calls that take gradients are kept, if they are


class Steps:
    """Tells of each call of a function that takes gradients, of the one that is called the most.

    Args:
        taken: Receives the calls.

    Example:
        >>> steps = Steps(lambda call: print(call.given.function.__name__, float(call.result)))
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
        self._functions: dict[tuple[str, Any], Function] = {}
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

    @property
    def seen(self) -> bool:
        """Whether there was one."""
        return self._main is not None

    def unseen(self) -> "_Unseen":
        """Returns a block in which nothing is told of."""
        return _Unseen(self._local)

    def inside(self, call: Call, *, until_broken: bool = False) -> list[Turn]:
        """Returns the calls of what a step takes gradients of, or else the step itself.

        Args:
            call: The step, which is run once more, without being compiled as a whole; its loops
                run turn by turn if they hold such calls.
            until_broken: Whether to return the first call that gives something that is not finite,
                or else one for each function; otherwise those that are sampled.
        """
        if call.given.options:
            return [Turn(call, 0)]
        inner = self._inner(call, until_broken, contextlib.nullcontext())
        if not inner.turns and inner.broken is None:
            inner = self._inner(call, until_broken, jax.disable_jit())
        is_loop = any(turn.number > 1 for turn in (*inner.turns, inner.broken) if turn)
        found = inner.turns if inner.broken is None else [inner.broken]
        turns = found if is_loop else [Turn(each.call, 0) for each in found[:1]]
        return turns or [Turn(call, 0)]

    def _inner(self, call: Call, until_broken: bool, block: Any) -> Inner:
        self._local.inner = inner = Inner(until_broken)
        try:
            with self.unseen(), block, contextlib.suppress(Enough):
                call.given.function(*call.args, **call.kwargs)
        finally:
            self._local.inner = None
        return inner

    def _install(self) -> Iterator[Undo]:
        yield replace(jax, "jit", self._jit)
        yield replace(jax, "grad", functools.partial(self._grad, None))
        yield replace(jax, "value_and_grad", functools.partial(self._grad, _first))

    def _jit(self, original: Any, *functions: Any, **options: Any) -> Any:
        if not functions:
            return lambda function: self._jit(original, function, **options)
        # What is looked at later must still be there.
        kept = {name: value for name, value in options.items() if name not in _DONATING}
        self.donated |= any(options.get(name) not in (None, (), []) for name in _DONATING)
        made = original(*functions, **kept)
        return self._watched(Given(functions[0], self._known("jit", functions[0])), made)

    def _grad(
        self,
        loss: Any,
        original: Any,
        function: Any,
        argnums: Any = 0,
        has_aux: bool = False,
        **others: Any,
    ) -> Any:
        made = original(function, argnums, has_aux, **others)
        known = self._known("grad", function)
        known.takes_gradients = True
        place = functools.partial(loss, has_aux=has_aux) if loss else None
        return self._watched(Given(function, known, {"argnums": argnums}, place), made)

    def _known(self, way: str, function: Any) -> Function:
        # A loop may make the same function anew for each step.
        return self._functions.setdefault(
            (way, getattr(function, "__code__", function)), Function()
        )

    def _watched(self, given: Given, made: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(made)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(given, made, args, kwargs)

        for name in _MORE:
            if hasattr(made, name):
                setattr(call, name, getattr(made, name))
        return call

    def _call(self, given: Given, made: Any, args: Any, kwargs: Any) -> Any:
        local, known = self._local, given.known
        traced = _is_traced(args, kwargs)
        if local.outermost is not None:
            local.outermost.takes_gradients |= known.takes_gradients
            if local.inner is not None and given.options and not traced:
                return self._call_inside(local.inner, given, made, args, kwargs)
        if not self._active or local.outermost is not None or traced:
            return made(*args, **kwargs)
        local.outermost = known
        try:
            result = made(*args, **kwargs)
        finally:
            local.outermost = None
        if known.takes_gradients:
            with self.unseen():
                self._took(Call(given, args, kwargs, result))
        return result

    def _call_inside(self, inner: Inner, given: Given, made: Any, args: Any, kwargs: Any) -> Any:
        self._local.inner = None
        try:
            result = made(*args, **kwargs)
        finally:
            self._local.inner = inner
        inner.add(Call(given, args, kwargs), given.known, result)
        return result

    def _took(self, call: Call) -> None:
        known = call.given.known
        known.calls += 1
        if self._main is None or known.calls > self._main.calls:
            self._main = known
        if self._main is known:
            self._taken(call)


def _first(result: Any, *, has_aux: bool) -> Any:
    return result[0][0] if has_aux else result[0]


class _Unseen:
    """A block in which calls are part of another one."""

    def __init__(self, local: _Local) -> None:
        self._local = local

    def __enter__(self) -> None:
        self._before = self._local.outermost
        self._local.outermost = Function()

    def __exit__(self, *_: object) -> None:
        self._local.outermost = self._before


def _is_traced(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, kwargs)))
