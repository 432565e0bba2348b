"""Which region a thread is in: PyTorch's own autocast state, and the rules on top of it."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config

from halfstep.core import Rules
from halfstep.errors import UsageError
from halfstep.torch import _private
from halfstep.torch._dtypes import name_of
from halfstep.torch._engine import _fingerprint
from halfstep.torch._engine._active import Active
from halfstep.torch._engine._kernels import Kernels
from halfstep.torch._engine._observe import Listener
from halfstep.torch._engine._ops import Operation, operations
from halfstep.torch._engine._paths import PATHS
from halfstep.torch._engine._tables import Scope, Table, table
from halfstep.torch._engine._weights import WeightCache
from halfstep.torch._tracing import constant, in_graph, is_tracing, when_abandoned

DEFAULT = str(Rules())


class _Frame(NamedTuple):
    """What leaving a region restores."""

    actives: tuple[Active, ...]
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache_enabled: bool
    backward: Any
    patterns: tuple[str, ...]
    rules: str
    held: tuple[Operation, ...]


class _Local(threading.local):
    def __init__(self) -> None:
        self.actives: tuple[Active, ...] = ()
        self.frames: list[_Frame] = []
        self.rules: dict[str, str] = {}
        self.weights = WeightCache()
        self.plain = functools.lru_cache(maxsize=64)(self._plain)
        self.active: Callable[..., Active] = self.plain

    def _plain(self, cached: bool, *where: Any) -> Active:
        """Returns the rules of a region, the same object each time it is entered."""
        return Active(_ready_table(*where, cached, False), self.weights, None)

    def in_dtype(self, active: Active, low: torch.dtype) -> Active:
        """Returns the same rules for another compute dtype."""
        scope = active.table.scope
        return self.active(scope.cached, scope.device_type, low, active.table.rules_text)

    def observed(self, observer: Listener, cached: bool, *where: Any) -> Active:
        """Returns the rules of a region in which everything is recorded."""
        return Active(_ready_table(*where, cached, True), self.weights, observer)


_LOCAL = _Local()


def active_for(args: tuple[Any, ...]) -> Active | None:
    """Returns the rules in force for the device of these arguments, if autocast is on there."""
    first = args[0] if args else None
    for active in _LOCAL.actives:
        elsewhere = isinstance(first, torch.Tensor) and not active.owns(first)
        if not elsewhere and torch.is_autocast_enabled(active.device_type):
            # PyTorch's own autocast, inside of ours, may have changed the dtype.
            low = torch.get_autocast_dtype(active.device_type)
            return active if low is active.low else _LOCAL.in_dtype(active, low)
    return None


KERNELS = Kernels(active_for)


@in_graph
def enter(device_type: str, dtype: torch.dtype, enabled: bool, cached: bool, rules: str) -> None:
    """Enters a region; every `enter` needs its `leave`.

    The arguments are constants that a compiled graph can hold, so the rules come as their text; an
    empty one leaves the region to PyTorch's own autocast.
    """
    local = _LOCAL
    entered: tuple[Active, ...] = ()
    if enabled and rules:
        entered = (local.active(cached, device_type, dtype, rules),)
    others = tuple(active for active in local.actives if active.device_type != device_type)
    # A tracer knows the modules itself, and would take the hooks for a part of the model.
    follows = bool(entered) and not is_tracing()
    held = entered[0].table.passing if entered else ()
    KERNELS.hold(held)
    frame = _frame(device_type, entered[0].patterns if follows else (), held)
    local.frames.append(frame)
    when_abandoned(lambda: _abandon(frame))
    local.rules[device_type] = rules or frame.rules
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    torch.autocast_increment_nesting()
    # PyTorch's cache of casts does not notice a changed weight; ours does.
    torch.set_autocast_cache_enabled(False)
    # Eager backward runs outside of the region, so a compiled one has to be traced outside too.
    functorch_config.backward_pass_autocast = "off"
    _put_in_force(entered + others)


@in_graph
def leave() -> None:
    """Leaves the innermost region of this thread and restores everything it changed."""
    if not _LOCAL.frames:
        raise UsageError("autocast was left more often than it was entered in this thread.")
    frame = _LOCAL.frames.pop()
    torch.set_autocast_enabled(frame.device_type, frame.enabled)
    torch.set_autocast_dtype(frame.device_type, frame.dtype)
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(frame.cache_enabled)
    functorch_config.backward_pass_autocast = frame.backward
    _LOCAL.rules[frame.device_type] = frame.rules
    _put_in_force(frame.actives)
    if not _LOCAL.frames:
        _LOCAL.weights.clear()
    if frame.held:
        KERNELS.let_go(frame.held)
    if frame.patterns:
        PATHS.stop(frame.patterns)


def _abandon(frame: _Frame) -> None:
    """Leaves a region, and those inside it, if nobody did."""
    while any(entered is frame for entered in _LOCAL.frames):
        leave()


def _put_in_force(actives: tuple[Active, ...]) -> None:
    """Makes operations, and whoever compiles them, see these rules."""
    _LOCAL.actives = actives
    _fingerprint.publish(" | ".join(active.text for active in actives))
    _private.show_region(any(active.handles for active in actives))


@functools.lru_cache(maxsize=256)
def _ready_table(
    device_type: str, dtype: torch.dtype, rules: str, cached: bool, observed: bool
) -> Table:
    """Returns the table of a region; the kernels it needs are installed."""
    found = table(Scope(Rules.parse(rules), device_type, name_of(dtype), cached, observed))
    needed = found.edited() if observed else found.handled
    KERNELS.install(each for each in needed if each not in found.passing)
    return found


def _frame(device_type: str, patterns: tuple[str, ...], held: tuple[Operation, ...]) -> _Frame:
    if patterns:
        PATHS.start()
    return _Frame(
        _LOCAL.actives,
        device_type,
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.is_autocast_cache_enabled(),
        functorch_config.backward_pass_autocast,
        patterns,
        _LOCAL.rules.get(device_type, DEFAULT),
        held,
    )


@contextlib.contextmanager
def on_trial() -> Iterator[None]:
    """Removes the kernels of rules that are entered in this thread for the first time."""
    try:
        with KERNELS.lent():
            yield
    finally:
        _ready_table.cache_clear()
        _LOCAL.plain.cache_clear()


@contextlib.contextmanager
def observed(observer: Listener) -> Iterator[None]:
    """Makes regions entered in this thread tell the observer what they run."""
    before = _LOCAL.active
    _LOCAL.active = functools.partial(_LOCAL.observed, observer)
    PATHS.start()
    try:
        with KERNELS.installed(operations(Rules.named("none"))):
            yield
    finally:
        PATHS.stop(())
        _LOCAL.active = before


@contextlib.contextmanager
def below_autocast() -> Iterator[None]:
    """Puts autocast in force where PyTorch has hidden it, as in a mode that watches operations."""
    before = [(a.device_type, torch.is_autocast_enabled(a.device_type)) for a in _LOCAL.actives]
    covered = _private.region_is_covered()
    for device_type, _ in before:
        torch.set_autocast_enabled(device_type, True)
    _private.cover_region(False)
    try:
        yield
    finally:
        _private.cover_region(covered)
        for device_type, enabled in before:
            torch.set_autocast_enabled(device_type, enabled)


@constant
def rules_in_force(device_type: str) -> str:
    """Returns the rules of the region around, also if it is switched off, or the default."""
    return _LOCAL.rules.get(device_type, DEFAULT)


def entered() -> bool:
    """Returns whether this thread is inside any region, or an island in one."""
    return bool(_LOCAL.frames)


def actives() -> tuple[Active, ...]:
    """Returns the rules in force in this thread, those of the innermost region first."""
    return _LOCAL.actives
