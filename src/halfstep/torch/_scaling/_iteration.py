"""What a scaler knows about each optimizer between two updates, and the order it insists on."""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.errors import NoCheckError, ScalerStateError
from halfstep.torch._scaling._gradients import Found, check, fingerprint, gradients_of
from halfstep.torch._scaling._steps import EMPTY, LATE, StepRecord
from halfstep.torch._scaling._widening import narrow_gradients

if TYPE_CHECKING:
    from halfstep.torch._scaler import GradScaler

State = dict[str, Any]

_ORDER = {
    (OptState.UNSCALED, "unscale_"): (
        "unscale_() has already been called on this optimizer since the last update(). Call it "
        "once per iteration, after the last backward() of the accumulated batch, and update() once "
        "at the end."
    ),
    (OptState.STEPPED, "unscale_"): (
        "unscale_() is being called after step(). Call it after backward() and before "
        "scaler.step(optimizer), and update() once per iteration after the steps."
    ),
    (OptState.STEPPED, "step"): (
        "step() has already been called since the last update(). Call scaler.update() once per "
        "iteration, after scaler.step(optimizer) of every optimizer."
    ),
}


def fresh_state() -> State:
    """Returns what is known about an optimizer that nothing was done with yet.

    The first two keys are PyTorch's. `seen` is the fingerprint of unscaled gradients, unneeded if
    they were unscaled `in_step`; `bad` is whether one was not finite, None if only a device knows;
    `widened` is what gives float16 parameters gradients in float16 again.
    """
    return {
        "stage": OptState.READY,
        "found_inf_per_device": {},
        "in_step": False,
        "seen": None,
        "bad": None,
        "record": None,
        "widened": [],
    }


def refuse_order(stage: OptState, function: str) -> None:
    """Raises an error if a function must not be called in this stage of an iteration."""
    if stage is not OptState.READY and (stage, function) in _ORDER:
        raise ScalerStateError(_ORDER[stage, function])


def refuse_unchecked(states: Iterable[State]) -> None:
    """Raises an error unless an optimizer was looked at, even if it had no gradients."""
    if all(state["stage"] is OptState.READY for state in states):
        raise NoCheckError(
            "No inf checks were recorded prior to update. Call scaler.update() once per iteration, "
            "after scaler.step(optimizer) of every optimizer; without a step() or unscale_() since "
            "the last update() it has nothing to go by."
        )


def founds_of(states: Iterable[State]) -> list[Tensor]:
    """Returns, from all optimizers and devices, 1.0 where a gradient was not finite."""
    return [found for state in states for found in state["found_inf_per_device"].values()]


def is_bad(state: State) -> bool:
    """Returns whether a gradient was not finite, and waits for the device to know it."""
    bad: bool | None = state.get("bad")
    if bad is None:
        bad = False
        for found in state["found_inf_per_device"].values():
            bad |= bool(found.item())
        state["bad"] = bad
    return bad


def known_bad(states: Iterable[State]) -> bool | None:
    """Returns whether any optimizer found a bad gradient, or None if only a device knows."""
    bad = False
    for state in states:
        if state["bad"] is None:
            for found in state["found_inf_per_device"].values():
                if not found.is_cpu:
                    return None
        bad |= is_bad(state)
    return bad


def total(founds: list[Tensor], device: torch.device) -> Tensor:
    """Returns 1.0, which is what fused kernels ask for, where any of the checks found something."""
    moved = [found.to(device, non_blocking=True) for found in founds]
    return moved[0] if len(moved) == 1 else torch.stack(moved).amax()


def found_late(scaler: "GradScaler", optimizer: Optimizer, state: State) -> Found:
    """Checks again the gradients that somebody has written to since they were unscaled."""
    if state["seen"] is None:
        return {}
    gradients = gradients_of(optimizer)
    if fingerprint(gradients) in (state["seen"], scaler._clipped_finite):
        return {}
    return check(gradients, scaler._cell.device)


def why_refused(scaler: "GradScaler", optimizer: Optimizer, state: State) -> str | None:
    """Returns why an optimizer must not step, None if it may; waits for the device once.

    An empty reason is one that is left to be found in the gradients.
    """
    if not state["found_inf_per_device"]:
        return EMPTY
    if state["seen"] is None:
        return "" if is_bad(state) else None
    late = [] if known_bad([state]) else [*found_late(scaler, optimizer, state).values()]
    if late and not total([*founds_of([state]), *late], scaler._cell.device).item():
        state["bad"] = False
        return None
    if is_bad(state):
        return ""
    return LATE if late else None


def finish(scaler: "GradScaler", optimizer: Optimizer, record: StepRecord) -> None:
    """Notes what a step did."""
    state = scaler._per_optimizer_states[id(optimizer)]
    narrow_gradients(state["widened"])
    state["stage"] = OptState.STEPPED
    state["record"] = record
    if record.known and record.skipped:
        # What LRScheduler looks at: a skipped step is no reason to call its order wrong.
        with contextlib.suppress(AttributeError):  # a wrapper with __slots__
            optimizer._opt_called = True  # type: ignore[attr-defined]
    scaler._record(optimizer, record)


def latest_skip(states: Iterable[State]) -> StepRecord:
    """Returns the record of a step that was skipped in this iteration, or what is known at all."""
    records = [state["record"] for state in states]
    skips = [record for record in records if record is not None and record.skipped]
    return skips[-1] if skips else StepRecord(skipped=True, reason="gradients were not finite")
