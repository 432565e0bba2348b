"""Lets regions and autocast compute in other formats than they were asked for."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from halfstep.core import Rule, Rules, replace
from halfstep.torch._dtypes import HALF
from halfstep.torch._engine import _state

Undo = Callable[[], None]


class Asked(NamedTuple):
    """What an autocast was asked for.

    Args:
        native: Whether it is PyTorch's own.
        device_type: Where it casts.
        dtype: The compute dtype.
        rules: The text of its rules; PyTorch's own has none.
    """

    native: bool
    device_type: str
    dtype: torch.dtype
    rules: str


@dataclass(frozen=True)
class Formats:
    """What takes the place of the formats that autocast was asked for.

    Args:
        low: The compute dtype; float32 switches it off, None leaves it.
        edits: Rows that are put on top of the rules in force.
        ours: Whether PyTorch's own autocast follows the default rules.
    """

    low: torch.dtype | None = None
    edits: tuple[Rule, ...] = ()
    ours: bool = False

    @property
    def as_asked(self) -> bool:
        """Whether nothing changes.

        Example:
            >>> Formats().as_asked, Formats(torch.float32).as_asked
            (True, False)
        """
        return self.low is None and not self.edits and not self.ours

    def enabled(self, asked: bool) -> bool:
        """Returns whether anything is cast."""
        return asked and self.low is not torch.float32

    def dtype(self, asked: torch.dtype) -> torch.dtype:
        """Returns what is computed in."""
        return asked if self.low is None or self.low is torch.float32 else self.low

    def rules(self, asked: str, *, native: bool = False) -> str:
        """Returns the text of the rules, with the edits; an empty one stands for PyTorch's own."""
        if native and (self.ours or self.edits):
            asked = _state.DEFAULT
        return str(edited(Rules.parse(asked), self.edits)) if asked else ""


def edited(rules: Rules, edits: tuple[Rule, ...]) -> Rules:
    """Returns rules with some rows on top of them."""
    for each in edits:
        rules = rules.with_rule(each.target, each.action, reason=each.reason, where=each.where)
    return rules


@contextlib.contextmanager
def computing(formats: Formats, model: nn.Module) -> Iterator[list[Asked]]:
    """Makes regions and autocast, PyTorch's own too, compute in formats until the block ends.

    Yields:
        What they were asked for, in the order in which they were entered.
    """
    asked: list[Asked] = []
    enter = _state.enter
    with contextlib.ExitStack() as stack:
        for undo in (*_ours(formats, asked), *_native(formats, asked, enter)):
            stack.callback(undo)
        if formats.low is torch.float32:
            stack.enter_context(_widened(model))
        yield asked


def _ours(formats: Formats, asked: list[Asked]) -> Iterator[Undo]:
    def enter(
        original: Any, device_type: str, dtype: Any, enabled: bool, cached: bool, rules: str
    ) -> None:
        if enabled and rules:
            asked.append(Asked(False, device_type, dtype, rules))
        dtype, enabled = formats.dtype(dtype), formats.enabled(enabled)
        original(device_type, dtype, enabled, cached, formats.rules(rules))

    yield replace(_state, "enter", enter)


def _native(
    formats: Formats, asked: list[Asked], enter_region: Callable[..., None]
) -> Iterator[Undo]:
    def enter(original: Any, native: Any) -> Any:
        device_type, dtype, enabled = native.device, native.fast_dtype, native._enabled
        if enabled:
            asked.append(Asked(True, device_type, dtype, ""))
        if formats.as_asked:
            return original(native)
        dtype, enabled = formats.dtype(dtype), formats.enabled(enabled)
        enter_region(device_type, dtype, enabled, False, formats.rules("", native=True))
        return native

    def leave(original: Any, native: Any, *error: Any) -> Any:
        return original(native, *error) if formats.as_asked else _state.leave()

    yield replace(torch.autocast, "__enter__", enter)
    yield replace(torch.autocast, "__exit__", leave)


@contextlib.contextmanager
def _widened(model: nn.Module) -> Iterator[None]:
    """Lets parameters and buffers in half precision be in float32 until the block ends."""
    values = [*model.parameters(), *model.buffers()]
    kept = [(each, each.data) for each in values if each.dtype in HALF]
    for each, data in kept:
        each.data = data.float()
    try:
        yield
    finally:
        for each, data in kept:
            each.data = data


def widened(batch: Any) -> Any:
    """Returns a batch with its tensors of half precision in float32.

    Example:
        >>> widened({"x": torch.ones(1).half()})
        {'x': tensor([1.])}
    """
    return _pytree.tree_map(_wide, batch)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value
