"""The kernels that carry the rules out, installed once per operation and process."""

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.library import Library

from halfstep.torch import _private
from halfstep.torch._engine._ops import Operation

_NUMBERS = (int, float, bool, complex)
_Find = Callable[[tuple[Any, ...]], Any]


class Kernels:
    """The operations that have a kernel of ours.

    A kernel stays installed: outside of a region no thread reaches it. What is installed for an
    observation is removed again, because those operations are quicker without, and what cannot be
    called everywhere once no region needs it any more.

    Args:
        find: Returns the rules in force for the arguments of a call, or None.
    """

    def __init__(self, find: _Find) -> None:
        self._find = find
        self._installed: dict[str, Library] = {}
        self._passing: set[str] = set()
        self._held: Counter[str] = Counter()
        # What was held last, and how often again since: a region is entered again and again.
        self._last: tuple[Operation, ...] = ()
        self._again = 0
        self._lock = threading.Lock()

    def install(self, operations: Iterable[Operation]) -> None:
        """Installs the kernels of operations that have none yet, for good."""
        with self._lock:
            for operation in operations:
                self._add(operation)
                self._passing.discard(operation.name)

    def hold(self, operations: tuple[Operation, ...]) -> None:
        """Installs kernels until nobody holds them; each `hold` needs its `let_go`.

        What nobody holds is removed by the next one who holds something else, so that a region that
        is entered again and again has its kernels ready.
        """
        if not operations and not self._held:
            return
        with self._lock:
            if operations and operations is self._last:
                self._again += 1
            else:
                self._count_again()
                self._hold_others(operations)
                self._last = operations

    def _hold_others(self, operations: tuple[Operation, ...]) -> None:
        for operation in operations:
            if self._add(operation) or operation.name in self._passing:
                self._held[operation.name] = 0
            self._passing.discard(operation.name)
        idle = [name for name, holders in self._held.items() if not holders]
        for name in set(idle).difference(each.name for each in operations):
            self._remove(name)
        self._held.update(each.name for each in operations if each.name in self._held)

    def _count_again(self) -> None:
        """Counts the holders of what was held last like those of anything else."""
        for operation in self._last if self._again else ():
            if operation.name in self._held:
                self._held[operation.name] += self._again
        self._last, self._again = (), 0

    def let_go(self, operations: tuple[Operation, ...]) -> None:
        """Ends a `hold`."""
        with self._lock:
            if self._again and operations is self._last:
                self._again -= 1
                return
            for operation in operations:
                if operation.name in self._held:
                    self._held[operation.name] -= 1

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
                    self._remove(name)
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
                    self._remove(name)

    def names(self) -> tuple[str, ...]:
        """Returns the operations that have a kernel at the moment."""
        return tuple(self._installed)

    def _remove(self, name: str) -> None:
        self._count_again()
        self._held.pop(name, None)
        _private.uninstall(self._installed.pop(name))

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


def takes_numbers(operation: Operation) -> bool:
    """Returns whether a number may stand for a tensor among the arguments of an operation.

    PyTorch reads it for a kernel in Python, which it cannot inside of `torch.func.grad` and the
    like: there such a call fails wherever there is a kernel, even one that does nothing.
    """
    return bool(_tensor_places(operation.overload))


def _tensor_places(overload: Any) -> tuple[int, ...]:
    """Returns which arguments after the first are tensors, for which a number may stand."""
    arguments = enumerate(overload._schema.arguments)
    return tuple(place for place, each in arguments if place and str(each.type) == "Tensor")


def _has_number(args: tuple[Any, ...], places: tuple[int, ...]) -> bool:
    """Returns whether a number stands for a tensor, which only a call from the top accepts."""
    return any(place < len(args) and type(args[place]) in _NUMBERS for place in places)


def _as_it_is(overload: Any, args: Any, kwargs: Any, casts: Any) -> Any:
    return overload(*args, **kwargs)
