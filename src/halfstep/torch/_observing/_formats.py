"""Lets regions and autocast compute in other formats than they were asked for."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from halfstep.core import Rule, Rules, replace
from halfstep.torch._dtypes import HALF
from halfstep.torch._engine import _state
from halfstep.torch._engine._paths import UnmatchedRuleWarning

Undo = Callable[[], None]


@dataclass(frozen=True)
class Formats:
    """What takes the place of the formats that autocast was asked for.

    Args:
        low: The compute dtype; float32 switches it off, None leaves it.
        edits: Rows that are put on top of the rules in force.
    """

    low: torch.dtype | None = None
    edits: tuple[Rule, ...] = ()

    @property
    def as_asked(self) -> bool:
        """Whether nothing changes.

        Example:
            >>> Formats().as_asked, Formats(torch.float32).as_asked
            (True, False)
        """
        return self.low is None and not self.edits

    def enabled(self, asked: bool) -> bool:
        """Returns whether anything is cast."""
        return asked and self.low is not torch.float32

    def dtype(self, asked: torch.dtype) -> torch.dtype:
        """Returns what is computed in."""
        return asked if self.low is None or self.low is torch.float32 else self.low

    def rules(self, asked: str) -> str:
        """Returns the text of the rules, with the edits."""
        if not asked or not self.edits:
            return asked
        rules = Rules.parse(asked)
        for edit in self.edits:
            rules = rules.with_rule(edit.target, edit.action, reason=edit.reason, where=edit.where)
        return str(rules)


@contextlib.contextmanager
def computing(formats: Formats, model: nn.Module) -> Iterator[None]:
    """Makes regions and autocast, PyTorch's own too, compute in formats until the block ends."""
    if formats.as_asked:
        yield
        return
    with contextlib.ExitStack() as stack:
        for undo in _changes(formats):
            stack.callback(undo)
        if formats.low is torch.float32:
            stack.enter_context(_widened(model))
        yield


def _changes(formats: Formats) -> Iterator[Undo]:
    def enter(
        original: Any, device_type: str, dtype: Any, enabled: bool, cached: bool, rules: str
    ) -> None:
        dtype, enabled = formats.dtype(dtype), formats.enabled(enabled)
        original(device_type, dtype, enabled, cached, formats.rules(rules))

    def enter_native(_: Any, native: Any) -> Any:
        _state.enter(native.device, native.fast_dtype, native._enabled, False, _state.DEFAULT)
        return native

    yield replace(_state, "enter", enter)
    yield replace(torch.autocast, "__enter__", enter_native)
    yield replace(torch.autocast, "__exit__", lambda _, native, *error: _state.leave())


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
