"""Makes loops that call an optimizer themselves visible."""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras

from halfstep.core import emit, replace
from halfstep.keras._patches import Undo
from halfstep.keras._readings import Reading, by_variable, number, reading
from halfstep.keras._watch import inside, tell_steps

# What shows values of compiled functions when they are run.
_BACKENDS = {"jax": "_loops_on_jax", "tensorflow": "_loops_on_tensorflow"}


def watch_loops() -> Undo:
    """Tells about the steps of loops that call an optimizer, eagerly or in a compiled function.

    A loss is what is passed to `scale_loss`, and on TensorFlow what a tape takes gradients of.

    Returns:
        A function that ends it.

    Example:
        >>> from halfstep.core import subscribe
        >>> unsubscribe = subscribe(lambda event, values: print(event))
        >>> end = watch_loops()
        >>> optimizer = keras.optimizers.SGD(0.1)
        >>> optimizer.apply([keras.ops.ones(2)], [keras.Variable([1.0, 2.0])])
        step
        update
        >>> end()
        >>> unsubscribe()
    """
    undo = list(_install())

    def end() -> None:
        while undo:
            undo.pop()()

    return end


class Loop:
    """What is told of a loop whose values are there when its functions run.

    A backend with compiled functions has one of its own.
    """

    def install(self) -> Iterator[Undo]:
        """Yields what undoes each further change."""
        yield from ()

    def read(self, value: Any) -> Any:
        """Returns a value as it is now."""
        return number(value)

    def loss(self, value: Any) -> None:
        """Tells about a loss."""
        emit("loss", value=number(keras.ops.mean(keras.ops.stop_gradient(value))), source="keras")

    def steps(self, optimizer: Any, before: Reading, after: Reading) -> None:
        """Tells about the steps between two readings."""
        tell_steps(optimizer, before, after)


class _Local(threading.local):
    depth = 0


_local = _Local()


@contextlib.contextmanager
def untold() -> Iterator[None]:
    """Tells of nothing that this thread does until the block ends."""
    _local.depth += 1
    try:
        yield
    finally:
        _local.depth -= 1


def _install() -> Iterator[Undo]:
    name = _BACKENDS.get(keras.config.backend())
    loop = importlib.import_module(f"halfstep.keras.{name}").Loop() if name else Loop()
    for method, around in _AROUND.items():
        for owner in _owners(keras.optimizers.Optimizer, method):
            yield replace(owner, method, functools.partial(_outermost, around, loop))
    yield from loop.install()


def _owners(owner: Any, name: str) -> Iterator[Any]:
    """Yields a class, and those below it that do it in their own way."""
    yield owner
    for each in owner.__subclasses__():
        yield from (found for found in _owners(each, name) if name in vars(found))


def _outermost(
    around: Callable[..., Any], loop: Loop, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Leaves alone what runs inside of another such call, or of a step that is told of."""
    if inside.step or _local.depth:
        return original(*args, **kwargs)
    return around(loop, functools.partial(_deeper, original), *args, **kwargs)


def _deeper(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with untold():
        return function(*args, **kwargs)


def _apply(
    loop: Loop, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
) -> Any:
    before = reading(optimizer, by_variable, loop.read)
    result = original(optimizer, *args, **kwargs)
    loop.steps(optimizer, before, reading(optimizer, by_variable, loop.read))
    return result


def _stateless_apply(
    loop: Loop, original: Callable[..., Any], optimizer: Any, values: Any, *args: Any, **kw: Any
) -> Any:
    result = original(optimizer, values, *args, **kw)
    before, after = (_of_values(loop, optimizer, each) for each in (values, result[1]))
    loop.steps(optimizer, before, after)
    return result


def _of_values(loop: Loop, optimizer: Any, values: Any) -> Reading:
    pairs = zip(optimizer.variables, values, strict=True)
    found = {id(variable): value for variable, value in pairs}
    return reading(optimizer, lambda variable: found[id(variable)], loop.read)


def _scale_loss(loop: Loop, original: Callable[..., Any], optimizer: Any, loss: Any) -> Any:
    loop.loss(loss)
    return original(optimizer, loss)


_AROUND: dict[str, Callable[..., Any]] = {
    "apply": _apply,
    "stateless_apply": _stateless_apply,
    "scale_loss": _scale_loss,
}
