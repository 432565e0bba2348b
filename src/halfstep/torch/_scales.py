"""What the loss was multiplied by that a backward pass starts from."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.torch._patches import Undo, replace
from halfstep.torch._scaler import GradScaler

_KEY = "halfstep.scaler"
# How many operations of a loss are looked at: what is done to it once it was scaled.
_NEAR = 32


class Scales:
    """Knows by which scaler the losses of a script are multiplied, and which goes backward.

    Args:
        tell: Is told of each scaler that multiplies a loss.

    Example:
        >>> scales = Scales(lambda scaler: None)
        >>> end = scales.start()
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> _ = weight.register_hook(lambda gradient: print(scales.backward()))
        >>> scaler = GradScaler("cpu", init_scale=8.0)
        >>> scaler.scale(weight.sum()).backward()
        tensor(8.)
        >>> end()
    """

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._scaler: Any = None
        self._latest: weakref.ref[Any] | None = None
        self._within = self._used = False

    def start(self) -> Undo:
        """Begins to know, and returns what ends it."""
        undo = [
            replace(torch.amp.GradScaler, "scale", self._scale),
            replace(GradScaler, "scale", self._scale),
            replace(torch.autograd, "backward", self._backward),
        ]

        def end() -> None:
            while undo:
                undo.pop()()

        return end

    def forget(self) -> None:
        """The step is over."""
        self._latest = None

    def latest(self) -> float | None:
        """Returns the scale of the latest scaled loss of the step, None without one."""
        scaler = None if self._latest is None else self._latest()
        return None if scaler is None else float(scaler.get_scale())

    def backward(self) -> Any:
        """Returns the scale that goes backward, None where it is not known; waits for nothing.

        A script without a scaler may scale by hand.
        """
        if not (self._within and self._used):
            return None
        scale = getattr(self._scaler, "_scale", None)
        return 1.0 if scale is None else scale.detach().clone()

    def _scale(self, original: Any, scaler: Any, outputs: Any) -> Any:
        if not scaler.is_enabled():
            return original(scaler, outputs)
        self._latest, self._used = weakref.ref(scaler), True
        self._tell(scaler)
        scaled = original(scaler, outputs)
        for each in _tensors(scaled):
            if each.grad_fn is not None:
                node: Any = each.grad_fn
                node.metadata[_KEY] = weakref.ref(scaler)
        return scaled

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> None:
        before = self._scaler, self._within
        roots = _tensors(args[0] if args else kwargs.get("tensors"))
        self._scaler, self._within = next(filter(None, map(_scaler_of, roots)), None), True
        try:
            original(*args, **kwargs)
        finally:
            self._scaler, self._within = before


def _tensors(values: Any) -> list[Tensor]:
    several = values if isinstance(values, list | tuple) else (values,)
    return [each for each in several if isinstance(each, Tensor)]


def _scaler_of(root: Tensor) -> Any:
    """Returns the scaler that multiplied a loss, or a part of it, None where none did."""
    known = (node.metadata.get(_KEY) for node in _nodes(root))
    return next((found() for found in known if found is not None), None)


def _nodes(root: Tensor) -> Iterator[Any]:
    waiting = deque([root.grad_fn])
    for _ in range(_NEAR):
        node = waiting.popleft() if waiting else None
        if node is not None:
            yield node
            waiting.extend(each for each, _ in node.next_functions)
