"""Watches what runs in a region, operation by operation, and fills the record of it."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.torch._dtypes import name_of
from halfstep.torch._engine._actions import Cache, tensors_of
from halfstep.torch._engine._ops import Operation
from halfstep.torch._engine._paths import PATHS
from halfstep.torch._explain import Explanation

# What autograd and factory functions do for themselves.
_BOOKKEEPING = ("aten::detach", "aten::lift_fresh")


class Listener(Protocol):
    """What operations with a rule, and casts, tell of themselves."""

    @property
    def seen(self) -> int:
        """How many operations went by."""

    def ruled(
        self, operation: Operation, action: str, args: Any, kwargs: Any, call: Callable[[], Any]
    ) -> Any:
        """Runs an operation that a rule decides about, and returns its result."""

    def count_cast(self, result: Tensor) -> None:
        """Counts a cast."""


class Observer(TorchDispatchMode):
    """Fills an explanation: ruled operations tell it themselves, others it sees go by.

    Args:
        explanation: What is filled.
        again: Puts autocast in force for the parts of an operation, where PyTorch hides it.
    """

    def __init__(self, explanation: Explanation, again: Callable[[], Any]) -> None:
        super().__init__()
        self._explanation = explanation
        self._again = again
        self._depth = self._seen = 0
        self._copies = self._copied_bytes = 0

    def ruled(
        self, operation: Operation, action: str, args: Any, kwargs: Any, call: Callable[[], Any]
    ) -> Any:
        """Runs an operation that a rule decides about, and records it unless it is part of one."""
        self._depth += 1
        before = (self._copies, self._copied_bytes)
        try:
            result = call()
        finally:
            self._depth -= 1
        if not self._depth:
            made = (self._copies - before[0], self._copied_bytes - before[1])
            self._record(operation.base, action, (*args, *kwargs.values()), result, *made)
        return result

    @property
    def seen(self) -> int:
        """How many operations went by."""
        return self._seen

    def count_cast(self, result: Tensor) -> None:
        """Counts a cast for the operation that is running, unless it is part of another one."""
        if self._depth == 1:
            self._copies += 1
            self._copied_bytes += result.numel() * result.element_size()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self._seen += 1
        if self._depth:
            return func(*args, **(kwargs or {}))
        self._depth += 1
        try:
            with self._again():
                result = func(*args, **(kwargs or {}))
        finally:
            self._depth -= 1
        if func._schema.name not in _BOOKKEEPING:
            self._record(func._schema.name, "", args, result, 0, 0)
        return result

    def _record(
        self, name: str, action: str, given: Any, result: Any, casts: int, cast_bytes: int
    ) -> None:
        outputs = result if isinstance(result, list | tuple) else (result,)
        key = (name, PATHS.current(), action, _dtypes(given), _dtypes(outputs))
        self._explanation.add(key, casts, cast_bytes)


class CountingCache:
    """A cache of casts that tells an observer what it really cast.

    Args:
        cache: The cache that does the work.
        observer: Who counts.
    """

    def __init__(self, cache: Cache, observer: Listener) -> None:
        self._cache = cache
        self._observer = observer

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in another dtype, counted unless it came from memory."""
        before = self._observer.seen
        result = self._cache.cast(tensor, dtype)
        if self._observer.seen > before:
            self._observer.count_cast(result)
        return result


def _dtypes(values: Any) -> tuple[str, ...]:
    return tuple(name_of(tensor.dtype) for tensor in tensors_of(values))
