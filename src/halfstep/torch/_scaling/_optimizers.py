"""What is remembered about optimizers, without keeping one alive."""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from halfstep.errors import UsageError

Value = TypeVar("Value")


def reference(optimizer: Any) -> Callable[[], Any]:
    """Returns what gives the optimizer for as long as it is alive.

    Wrappers with `__slots__` cannot be referenced weakly; those are kept.
    """
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


def checked_optimizer(optimizer: Any, function: str) -> None:
    """Raises an error unless an optimizer, or a wrapper that looks like one, was passed."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return
    if not (hasattr(optimizer, "param_groups") and callable(getattr(optimizer, "step", None))):
        raise UsageError(
            f"{function} needs an optimizer, got {type(optimizer).__name__}. Pass the "
            "torch.optim.Optimizer whose parameters were in backward()."
        )


@functools.lru_cache(maxsize=64)
def takes_scaler(kind: Any) -> bool:
    """Returns whether optimizers of a class follow the older protocol of fused kernels."""
    return "grad_scaler" in inspect.signature(kind.step).parameters


def divides(optimizer: Any) -> bool:
    """Returns whether the kernel of an optimizer divides gradients by its `grad_scale`."""
    kind: Any = type(optimizer)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and not takes_scaler(kind)


def lacks_state(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a parameter that is about to be stepped has no state yet."""
    state = getattr(optimizer, "state", {})
    return any(
        parameter.grad is not None and not state.get(parameter)
        for group in optimizer.param_groups
        # SGD without momentum never keeps any.
        if group.get("momentum") != 0
        for parameter in group["params"]
    )


class PerOptimizer(Generic[Value]):
    """A mapping by identity, so that optimizers need neither `__hash__` nor weak references.

    Example:
        >>> optimizer = torch.optim.SGD([torch.ones(1)])
        >>> counts = PerOptimizer()
        >>> counts[optimizer] = 3
        >>> counts.get(optimizer), list(counts.values())
        (3, [3])
        >>> counts.pop(optimizer)
        >>> counts.get(optimizer) is None
        True
    """

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: dict[int, tuple[Callable[[], Any], Value]] = {}

    def get(self, optimizer: torch.optim.Optimizer) -> Value | None:
        """Returns what is remembered, if it is."""
        kept, value = self._items.get(id(optimizer), (None, None))
        # Another optimizer may have had this number before.
        return value if kept is not None and kept() is optimizer else None

    def __setitem__(self, optimizer: torch.optim.Optimizer, value: Value) -> None:
        kept, _ = self._items.get(id(optimizer), (None, None))
        if kept is None or kept() is not optimizer:
            self._purge()
            kept = reference(optimizer)
        self._items[id(optimizer)] = kept, value

    def __bool__(self) -> bool:
        return bool(self._items)

    def _purge(self) -> None:
        self._items = {key: item for key, item in self._items.items() if item[0]() is not None}

    def pop(self, optimizer: torch.optim.Optimizer) -> None:
        """Forgets an optimizer."""
        self._items.pop(id(optimizer), None)

    def values(self) -> list[Value]:
        """Returns what is remembered about the optimizers that are alive."""
        self._purge()
        return [value for _, value in self._items.values()]
