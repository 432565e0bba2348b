"""The loss scale of a scaler: two tensors on the device, and what the host knows about them."""

from typing import Any

import torch
from torch import Tensor

from halfstep.core import LossScale, ScaleState

FLOAT32_MAX = torch.finfo(torch.float32).max


class ScaleCell:
    """Holds the scale and its counters, and moves them by the rule of a `LossScale`.

    On the CPU the tensors are read where needed. On an accelerator reading would wait for the
    device, so the host remembers what it wrote as long as nobody else writes; when it does not
    know the state any more, the transition happens on the device.

    Args:
        rule: How the scale changes.

    Example:
        >>> cell = ScaleCell(LossScale(init_scale=8.0))
        >>> cell.start(torch.device("cpu"))
        >>> cell.known()
        ScaleState(scale=8.0, finite_steps=0, overflows=0)
    """

    def __init__(self, rule: LossScale) -> None:
        self.rule = rule
        self.initial = rule.init()
        self.scale: Tensor | None = None
        self.tracker: Tensor | None = None
        self.overflows: int | Tensor = 0
        self._latest = self.initial.scale
        self._written: tuple[Any, ...] = ()
        self._state = self.initial

    def __getstate__(self) -> dict[str, Any]:
        state = self.read()
        return {"rule": self.rule, "initial": state}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["rule"])  # type: ignore[misc]
        self.put(state["initial"])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Returns scale and counter of a cell that was started."""
        assert self.scale is not None
        assert self.tracker is not None
        return self.scale, self.tracker

    @property
    def device(self) -> torch.device:
        """Where the scale lives."""
        assert self.scale is not None
        return self.scale.device

    def snapshot(self) -> float | Tensor:
        """Returns the scale as a number, or as a copy of the tensor if only the device knows."""
        state = self.known()
        if state is not None:
            return state.scale
        assert self.scale is not None
        return self.scale.clone()

    def start(self, device: torch.device) -> None:
        """Puts the initial state on a device."""
        first = self.initial
        self.scale = torch.full((), first.scale, dtype=torch.float32, device=device)
        self.tracker = torch.full((), first.finite_steps, dtype=torch.int32, device=device)
        self.overflows = first.overflows
        self._remember(first)

    def known(self) -> ScaleState | None:
        """Returns the state if the host can tell it without waiting for a device."""
        scale, tracker, overflows = self.scale, self.tracker, self.overflows
        if scale is None or tracker is None:
            return self.initial
        if isinstance(overflows, Tensor):
            return None
        if scale.is_cpu and tracker.is_cpu:
            return ScaleState(scale.item(), int(tracker.item()), overflows)
        return self._state if self._written == self._marks() else None

    def known_scale(self) -> float | None:
        """Returns the scale if the host can tell it without waiting for a device."""
        if self.scale is not None and self.scale.is_cpu:
            return self.scale.item()
        state = self.known()
        return None if state is None else state.scale

    def read(self) -> ScaleState:
        """Returns the state, and waits for the device if it must."""
        state = self.known()
        if state is None:
            scale, tracker = self.tensors()
            overflows = int(self.overflows)
            state = ScaleState(scale.item(), int(tracker.item()), overflows)
            self.overflows = overflows
            self._remember(state)
        return state

    def put(self, state: ScaleState, before: ScaleState | None = None) -> None:
        """Makes this the state, where the host may know the state before."""
        if self.scale is None or self.tracker is None:
            self.initial = state
            self._latest = state.scale
            return
        before = before or self.known()
        if before is None or before.scale != state.scale:
            self.scale.fill_(state.scale)
        if before is None or before.finite_steps != state.finite_steps:
            self.tracker.fill_(state.finite_steps)
        self.overflows = state.overflows
        if not self.scale.is_cpu:
            self._remember(state)

    def set_scale(self, scale: float) -> float | None:
        """Sets the scale alone, and returns the one before if the host knows it."""
        before = self.known()
        if before is not None:
            self.put(before._replace(scale=scale), before)
            return before.scale
        self.tensors()[0].fill_(scale)
        self._latest = min(self._latest, scale)
        return None

    def cap(self, limit: float) -> tuple[float, float] | None:
        """Lowers the scale to a limit, and returns before and after if it is known to change."""
        before = self.known()
        if before is None:
            assert self.scale is not None
            self.scale.clamp_(max=limit)
            self._latest = min(self._latest, limit)
        elif before.scale > limit:
            self.put(before._replace(scale=limit))
            return before.scale, limit
        return None

    def may_be_below_one(self) -> bool:
        """Returns whether unscaling may enlarge gradients, by what the host knew last."""
        state = self.known()
        return (self._latest if state is None else state.scale) < 1.0

    def inverse(self) -> Tensor:
        """Returns 1 / scale as a finite tensor, without float64 on the device."""
        tensor, _ = self.tensors()
        state = None if tensor.is_cpu else self.known()
        if state is None and not tensor.is_cpu:
            return tensor.reciprocal().clamp_(max=FLOAT32_MAX)
        scale = tensor.item() if state is None else state.scale
        value = min(1.0 / scale, FLOAT32_MAX) if scale else FLOAT32_MAX
        return torch.full((), value, dtype=torch.float32, device=tensor.device)

    def advance_on_device(self, found: Tensor, kept: Tensor | None) -> None:
        """Moves to the next state without waiting for the device.

        Args:
            found: More than 0.0 where a gradient was not finite.
            kept: True where the loss was not finite either, which leaves the state as it is.
        """
        scale, tracker = self.tensors()
        overflows = torch.as_tensor(self.overflows, dtype=torch.int32, device=scale.device)
        before = (scale, tracker, overflows)
        bad = found > 0
        after = next_on_device(self.rule, before, bad)
        if kept is not None:
            after = tuple(map(torch.where, (bad & kept,) * 3, before, after))
        scale.copy_(after[0])
        tracker.copy_(after[1])
        self.overflows = after[2] if self.rule.hysteresis > 1 else 0
        self._written = ()

    def _marks(self) -> tuple[Any, ...]:
        scale, tracker = self.tensors()
        return id(scale), scale._version, id(tracker), tracker._version

    def _remember(self, state: ScaleState) -> None:
        self._state, self._written, self._latest = state, self._marks(), state.scale


def next_on_device(
    rule: LossScale, before: tuple[Tensor, Tensor, Tensor], bad: Tensor
) -> tuple[Tensor, ...]:
    """Returns scale, counter and overflows after a step, as `LossScale.next` does, as tensors."""
    scale, steps, overflows = before
    counted = (overflows + 1).clamp(max=rule.hysteresis)
    factor = torch.where(counted == rule.hysteresis, rule.backoff_factor, 1.0)
    lowered = torch.maximum(scale * factor, scale.clamp(max=rule.min_scale))
    grows = steps + 1 >= rule.growth_interval
    grown = scale * torch.where(grows, rule.growth_factor, 1.0)
    grown = torch.where(grown <= rule.max_scale, grown, scale)
    return (
        torch.where(bad, lowered, grown),
        torch.where(bad | grows, 0, steps + 1).to(steps.dtype),
        torch.where(bad, counted, torch.where(grows, 0, overflows)).to(overflows.dtype),
    )
