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
from halfstep.torch._engine._paths import PATHS
from halfstep.torch._observing._force import Force
from halfstep.torch._observing._sources import source_of
from halfstep.torch._observing._ways import Asked, Way
from halfstep.torch._regions._forward import Forward

Undo = Callable[[], None]


class Edit(NamedTuple):
    """A row that is put on top of the rules of a region or an autocast."""

    way: Way
    rule: Rule


@dataclass(frozen=True)
class Formats:
    """What takes the place of the formats that regions and autocasts were asked for.

    Args:
        low: The compute dtype; float32 switches all of them off, None leaves it.
        edits: Rows that are put on top of their rules.
        ours: Whether PyTorch's own autocast follows the default rules.
        only: Which of them another compute dtype and `ours` are for, None for all.
        wide: Whether parameters in half precision are in float32, as they are where all is.
    """

    low: torch.dtype | None = None
    edits: tuple[Edit, ...] = ()
    ours: bool = False
    only: Way | None = None
    wide: bool = False

    def changes(self, way: Way | None) -> bool:
        """Returns whether anything changes in a region or an autocast; None stands for an island.

        Example:
            >>> way = Way(asked=Asked(True, "cpu", torch.float16, ""))
            >>> Formats().changes(way), Formats(torch.float32).changes(way)
            (False, True)
        """
        if self.low is torch.float32:
            return True
        meant = way is not None and self.only in (None, way)
        return (meant and (self.low is not None or self.ours)) or bool(self._edits(way))

    def enabled(self, asked: bool) -> bool:
        """Returns whether anything is cast."""
        return asked and self.low is not torch.float32

    def dtype(self, asked: torch.dtype, way: Way | None) -> torch.dtype:
        """Returns what is computed in."""
        kept = self.low is None or self.low is torch.float32 or self.only not in (None, way)
        return asked if kept or self.low is None else self.low

    def rules(self, asked: str, way: Way | None, *, native: bool = False) -> str:
        """Returns the text of the rules, with the edits; an empty one stands for PyTorch's own."""
        edits = self._edits(way)
        if native and (edits or (self.ours and self.only in (None, way))):
            asked = _state.DEFAULT
        return str(edited(Rules.parse(asked), edits)) if asked else ""

    def located(self, way: Way, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Lets the paths of edits begin at a region, where there are any for it."""
        has_paths = any(each.where for each in self._edits(way))
        return PATHS.rooted(module) if has_paths else contextlib.nullcontext()

    def _edits(self, way: Way | None) -> tuple[Rule, ...]:
        return tuple(each.rule for each in self.edits if each.way == way)


def edited(rules: Rules, edits: tuple[Rule, ...]) -> Rules:
    """Returns rules with some rows on top of them."""
    for each in edits:
        rules = rules.with_rule(each.target, each.action, reason=each.reason, where=each.where)
    return rules


@contextlib.contextmanager
def computing(formats: Formats, force: Force, model: nn.Module) -> Iterator[None]:
    """Makes regions and autocast, PyTorch's own too, compute in formats until the block ends.

    Args:
        formats: The formats.
        force: Is told of all that is entered and left.
        model: The model, of which parameters in half precision are in float32 where all is.
    """
    enter, leave = _state.enter, _state.leave
    with contextlib.ExitStack() as stack:
        for undo in (*_ours(formats, force), *_native(formats, force, enter, leave)):
            stack.callback(undo)
        if formats.wide or formats.low is torch.float32:
            stack.enter_context(_widened(model))
        yield


def _ours(formats: Formats, force: Force) -> Iterator[Undo]:
    def enter(
        original: Any, device_type: str, dtype: Any, enabled: bool, cached: bool, rules: str
    ) -> None:
        casts = bool(enabled and rules)
        asked = Asked(False, device_type, dtype, rules, force.source()) if casts else None
        way = force.enter(asked)
        chosen = formats.rules(rules, way)
        original(device_type, formats.dtype(dtype, way), formats.enabled(enabled), cached, chosen)

    def leave(original: Any) -> None:
        original()
        force.leave()

    def run(original: Any, forward: Any, *args: Any) -> Any:
        with force.running(forward) as way, formats.located(way, forward._owner()):
            return original(forward, *args)

    yield replace(_state, "enter", enter)
    yield replace(_state, "leave", leave)
    yield replace(Forward, "_run", run)


def _native(
    formats: Formats,
    force: Force,
    enter_region: Callable[..., None],
    leave_region: Callable[[], None],
) -> Iterator[Undo]:
    def enter(original: Any, native: Any) -> Any:
        device_type, dtype, enabled = native.device, native.fast_dtype, native._enabled
        asked = Asked(True, device_type, dtype, "", source_of(native) or force.source())
        way = force.enter(asked if enabled else None)
        if not formats.changes(way):
            return original(native)
        dtype, enabled = formats.dtype(dtype, way), formats.enabled(enabled)
        enter_region(device_type, dtype, enabled, False, formats.rules("", way, native=True))
        return native

    def leave(original: Any, native: Any, *error: Any) -> Any:
        return leave_region() if formats.changes(force.leave()) else original(native, *error)

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
