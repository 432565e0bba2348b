"""The kernels that carry the rules out, installed once per operation and process."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.library import Library

from halfstep.torch import _private
from halfstep.torch._engine._ops import Operation

_NUMBERS = (int, float, bool, complex)
_Find = Callable[[tuple[Any, ...]], Any]


class Kernels:
    """The operations that have a kernel of ours.

    A kernel stays installed: outside of a region no thread reaches it. Only what is installed for
    an observation is removed again, because those operations are quicker without.

    Args:
        find: Returns the rules in force for the arguments of a call, or None.
    """

    def __init__(self, find: _Find) -> None:
        self._find = find
        self._installed: dict[str, Library] = {}
        self._passing: set[str] = set()
        self._lock = threading.Lock()

    def install(self, operations: Iterable[Operation]) -> None:
        """Installs the kernels of operations that have none yet, for good."""
        with self._lock:
            for operation in operations:
                self._add(operation)
                self._passing.discard(operation.name)

    @contextlib.contextmanager
    def installed(self, operations: Iterable[Operation]) -> Iterator[None]:
        """Installs the kernels of operations until the block ends."""
        with self._lock:
            added = [operation.name for operation in operations if self._add(operation)]
            self._passing.update(added)
        try:
            yield
        finally:
            with self._lock:
                for name in self._passing.intersection(added):
                    _private.uninstall(self._installed.pop(name))
                self._passing.difference_update(added)

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Removes what is installed within the block when it ends."""
        before = set(self._installed)
        try:
            yield
        finally:
            with self._lock:
                for name in self._installed.keys() - before:
                    _private.uninstall(self._installed.pop(name))

    def names(self) -> tuple[str, ...]:
        """Returns the operations that have a kernel at the moment."""
        return tuple(self._installed)

    def _add(self, operation: Operation) -> bool:
        if operation.name in self._installed:
            return False
        kernel = _kernel(operation, self._find)
        self._installed[operation.name] = _private.install(operation.name, kernel)
        return True


def _kernel(operation: Operation, find: _Find) -> Callable[..., Any]:
    overload = operation.overload
    places = _tensor_places(overload)

    def kernel(keyset: Any, /, *args: Any, **kwargs: Any) -> Any:
        active = find(args)
        found = None if active is None else active.find(operation)
        if found is None:
            if places and _has_number(args, places):
                with _private.without_ours():
                    return overload(*args, **kwargs)
            return overload.redispatch(keyset & _private.BELOW_OURS, *args, **kwargs)
        runner, casts = found
        if runner is None and not _has_number(args, places):
            # What the operation is made of may have rules.
            return overload.redispatch(keyset & _private.BELOW_ALL_AUTOCAST, *args, **kwargs)
        with _private.without_autocast():
            return (runner or _as_it_is)(overload, args, kwargs, casts)

    _private.never_compile(kernel)
    return kernel


def _tensor_places(overload: Any) -> tuple[int, ...]:
    """Returns which arguments after the first are tensors, for which a number may stand."""
    arguments = enumerate(overload._schema.arguments)
    return tuple(place for place, each in arguments if place and str(each.type) == "Tensor")


def _has_number(args: tuple[Any, ...], places: tuple[int, ...]) -> bool:
    """Returns whether a number stands for a tensor, which only a call from the top accepts."""
    return any(place < len(args) and type(args[place]) in _NUMBERS for place in places)


def _as_it_is(overload: Any, args: Any, kwargs: Any, casts: Any) -> Any:
    return overload(*args, **kwargs)
