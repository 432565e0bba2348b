"""What stands in front of the methods of one optimizer, and what it is shown of its parameters."""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.torch._masters._views import Views


class Front:
    """A function in the place of a method of an optimizer.

    It is no method, which would keep the optimizer alive, but has what schedulers ask of one.

    Args:
        optimizer: The optimizer.
        name: The name of the method.
        call: What is called instead, with its arguments.
    """

    def __init__(self, optimizer: Optimizer, name: str, call: Callable[[Any, Any], Any]) -> None:
        self._name = name
        # What the instance had of its own, None for the method of its class.
        self.own: Callable[..., Any] | None = optimizer.__dict__.get(name)
        self._put: Callable[[], Callable[..., Any] | None] = _put(optimizer, name, call)

    def remove(self, optimizer: Optimizer) -> None:
        """Gives the optimizer its own method back, unless somebody has replaced the function."""
        put = self._put()
        if put is not None and optimizer.__dict__.get(self._name) is put:
            delattr(optimizer, self._name)
            if self.own is not None:
                setattr(optimizer, self._name, self.own)


def _put(
    optimizer: Optimizer, name: str, call: Callable[[Any, Any], Any]
) -> Callable[[], Callable[..., Any] | None]:
    """Puts a function in the place of a method, and returns what gives it while it is there."""
    method = getattr(optimizer, name)
    like = functools.wraps(getattr(method, "__func__", method))

    @like
    def of_any(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    @like
    def of_one(*args: Any, **kwargs: Any) -> Any:
        return call(args, kwargs)

    put: Any = of_one
    put.__func__ = of_any
    with contextlib.suppress(TypeError, ValueError):
        put.__signature__ = inspect.signature(method)
    setattr(optimizer, name, put)
    return weakref.ref(put)


@contextlib.contextmanager
def showing_only(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Shows an optimizer only some of its parameters for a while."""
    views = Views(optimizer)
    views.show({id(each): [each] for each in parameters})
    try:
        yield
    finally:
        views.restore()
