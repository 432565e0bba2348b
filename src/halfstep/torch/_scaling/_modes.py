"""The work of an enabled scaler, and of one that has nothing to do."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.core import ScaleState, emit, listening
from halfstep.errors import NonFiniteError
from halfstep.torch._masters._kept import kept_tensors
from halfstep.torch._private import break_graphs
from halfstep.torch._scaling._clipped_step import Clipping, clipped_step
from halfstep.torch._scaling._closure import (
    Evaluation,
    NonFiniteEvaluationError,
    Snapshot,
    closure_of,
    with_closure,
)
from halfstep.torch._scaling._fused import step_fused
from halfstep.torch._scaling._gradients import gradients_of
from halfstep.torch._scaling._iteration import (
    State,
    finish,
    founds_of,
    is_bad,
    known_bad,
    latest_skip,
    refuse_order,
    refuse_unchecked,
    total,
    why_refused,
)
from halfstep.torch._scaling._master import step_optimizer
from halfstep.torch._scaling._optimizers import checked_optimizer
from halfstep.torch._scaling._outputs import LARGEST_FOR_HALF, holds_half, map_outputs, widened
from halfstep.torch._scaling._records import skipped_record, taken_record
from halfstep.torch._scaling._released import note_scaled
from halfstep.torch._scaling._settings import is_distributed, scale_within
from halfstep.torch._scaling._steps import StepRecord, advice

if TYPE_CHECKING:
    from halfstep.torch._scaler import GradScaler

_POLLED_EVERY = 64
Method = TypeVar("Method", bound=Callable[..., Any])


def _not_compiled(method: Method) -> Method:
    """Makes `torch.compile` break its graph here: what a scaler looks at is not in graphs."""
    break_graphs(method)
    return method


class PassThrough:
    """Leaves losses and gradients alone and only keeps the records."""

    enabled = False

    def scale(self, scaler: "GradScaler", outputs: Any) -> Any:
        """Returns the outputs as they are."""
        if listening():
            _tell_loss(outputs)
        return outputs

    def unscale_(self, scaler: "GradScaler", optimizer: Optimizer) -> None:
        """Does nothing."""

    def step(
        self,
        scaler: "GradScaler",
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
        max_norm: float | None = None,
    ) -> Any:
        """Steps the optimizer, which finds clipped gradients if there is a limit."""
        if max_norm is None:
            result, norm = optimizer.step(*args, **kwargs), None
        else:
            result, norm = clipped_step(optimizer, args, kwargs, max_norm)
        scaler._record(optimizer, StepRecord(grad_norm=norm))
        return result

    def update(self, scaler: "GradScaler", new_scale: Any) -> None:
        """Does nothing."""
        if listening():
            emit("update", scale=1.0, scaler=id(scaler))


class Scaling:
    """Multiplies losses, divides gradients, skips bad steps and moves the scale."""

    enabled = True

    def scale(self, scaler: "GradScaler", outputs: Any) -> Any:
        """Returns the outputs times the scale."""
        if isinstance(outputs, Tensor):
            return self._scale_tensor(scaler, outputs)
        if holds_half(outputs):
            self._make_room_for_half(scaler)
        return map_outputs(outputs, functools.partial(self._scale_tensor, scaler))

    def _scale_tensor(self, scaler: "GradScaler", outputs: Tensor) -> Tensor:
        if outputs.dtype is torch.float16:
            self._make_room_for_half(scaler)
        scale = scaler._cell.scale
        if scale is None:
            scaler._lazy_init_scale_growth_tracker(outputs.device)
            scale, _ = scaler._check_scale_growth_tracker("scale")
        scaler._scale_calls += 1
        scaler._clip_watch = True
        scaler._losses.note(outputs)
        if listening():
            _tell_loss(outputs)
        if scale.device != outputs.device:
            scale = scale.to(outputs.device, non_blocking=True)
        scaled = widened(outputs) * scale
        note_scaled(scaled)
        return scaled

    def _make_room_for_half(self, scaler: "GradScaler") -> None:
        """Lowers the scale before its first use in an iteration; within one it cannot change."""
        if scaler._scale_calls == 0:
            change = scaler._cell.cap(LARGEST_FOR_HALF)
            if change:
                scaler._history.changed(*change, "float16 outputs cannot hold a larger scale")

    @_not_compiled
    def unscale_(self, scaler: "GradScaler", optimizer: Optimizer) -> None:
        """Divides an optimizer's gradients by the scale and checks them."""
        checked_optimizer(optimizer, "unscale_()")
        scaler._start_if_resumed(optimizer)
        scaler._check_scale_growth_tracker("unscale_")
        state = scaler._per_optimizer_states[id(optimizer)]
        refuse_order(state["stage"], "unscale_")
        scaler._losses.shared = len(scaler._per_optimizer_states) > 1
        found = torch.zeros((), dtype=torch.float32, device=scaler._cell.device)
        state["found_inf_per_device"] = scaler._unscale_grads_(
            optimizer, scaler._cell.inverse(), found, False
        )
        state["stage"] = OptState.UNSCALED

    @_not_compiled
    def step(
        self,
        scaler: "GradScaler",
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
        max_norm: float | None = None,
    ) -> Any:
        """Unscales what is not unscaled yet, and steps the optimizer if all is finite."""
        checked_optimizer(optimizer, "step()")
        closure = closure_of(args, kwargs)
        scaler._start_if_resumed(optimizer)
        if closure is None:
            scaler._check_scale_growth_tracker("step")
        state = scaler._per_optimizer_states[id(optimizer)]
        refuse_order(state["stage"], "step")
        scaler._losses.shared = len(scaler._per_optimizer_states) > 1
        if closure is not None:
            return self._step_closure(scaler, optimizer, args, kwargs, max_norm)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return step_fused(scaler, optimizer, state, args, kwargs, max_norm)
        if self._is_refused(scaler, optimizer, state, max_norm):
            return None
        result = scaler._maybe_opt_step(optimizer, state, *args, **kwargs)
        finish(scaler, optimizer, taken_record(scaler._facts()))
        return result

    def _is_refused(
        self,
        scaler: "GradScaler",
        optimizer: Optimizer,
        state: State,
        max_norm: float | None = None,
    ) -> bool:
        """Returns whether an optimizer must not step, and notes why; clips if it may."""
        clipping = Clipping(scaler, optimizer, state, max_norm)
        if state["stage"] is OptState.READY and not clipping.by_multiplying():
            state["in_step"] = True
            scaler.unscale_(optimizer)
        reason = why_refused(scaler, optimizer, state)
        if reason is None:
            clipping.of_unscaled()
            reason = "" if is_bad(state) else None
        if reason is not None:
            finish(scaler, optimizer, skipped_record(scaler._facts(), optimizer, reason))
        return reason is not None

    def _step_closure(
        self,
        scaler: "GradScaler",
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
        max_norm: float | None,
    ) -> Any:
        """Steps an optimizer that evaluates the loss, or undoes the step if a result was bad."""
        state = scaler._per_optimizer_states[id(optimizer)]
        scaled = scaler._scale_calls > 0 or state["stage"] is OptState.UNSCALED
        if scaled and gradients_of(optimizer) and self._is_refused(scaler, optimizer, state):
            return None
        snapshot = Snapshot(optimizer, kept_tensors(optimizer))
        evaluation = Evaluation(scaler, optimizer, closure_of(args, kwargs), max_norm)
        args, kwargs = with_closure(args, kwargs, evaluation)
        try:
            result = step_optimizer(optimizer, args, kwargs)
        except NonFiniteEvaluationError:
            snapshot.restore()
            finish(scaler, optimizer, skipped_record(scaler._facts(), optimizer))
            # Else the next step would find these gradients, and be skipped for them.
            optimizer.zero_grad()
            return None
        finish(scaler, optimizer, taken_record(scaler._facts()))
        return result

    @_not_compiled
    def update(self, scaler: "GradScaler", new_scale: Any) -> None:
        """Moves the scale on and begins the next iteration."""
        scaler._check_scale_growth_tracker("update")
        if new_scale is not None:
            number = scale_within(scaler._cell.rule, new_scale, "update(new_scale)")
            before = scaler._cell.set_scale(number)
            scaler._history.changed(before or number, number, "update(new_scale)")
        else:
            self._advance(scaler)
        scaler._begin_iteration()
        if listening():
            emit("update", scale=scaler._cell.snapshot(), scaler=id(scaler))

    def _advance(self, scaler: "GradScaler") -> None:
        cell, states = scaler._cell, scaler._per_optimizer_states.values()
        if not any(state["found_inf_per_device"] for state in states):
            refuse_unchecked(states)
            return
        before, bad = cell.known(), known_bad(states)
        if before is None or bad is None:
            kept = None if is_distributed() else scaler._losses.on_device(cell.device)
            cell.advance_on_device(total(founds_of(states), cell.device), kept)
            self._poll(scaler)
        elif not bad:
            after = cell.rule.next(before, finite=True)
            cell.put(after, before)
            if after.scale != before.scale:
                steps = f"{cell.rule.growth_interval} steps in a row were finite"
                scaler._history.changed(before.scale, after.scale, steps)
        elif is_distributed() or not scaler._losses.nonfinite():
            # Gradients are shared between processes but losses are not, nor may scales differ.
            self._back_off(scaler, before)

    def _back_off(self, scaler: "GradScaler", before: ScaleState) -> None:
        rule = scaler._cell.rule
        after = rule.next(before, finite=False)
        scaler._cell.put(after)
        record = latest_skip(scaler._per_optimizer_states.values())
        scaler._history.changed(before.scale, after.scale, record.reason)
        if rule.at_floor(before) and after.overflows >= rule.hysteresis:
            scaler._begin_iteration()
            raise NonFiniteError(_floor_text(before.scale, record))

    def _poll(self, scaler: "GradScaler") -> None:
        """Asks the device now and then, so that a run that stands still does not stay silent."""
        scaler._unseen_updates += 1
        if scaler._unseen_updates < _POLLED_EVERY:
            return
        scaler._unseen_updates = 0
        state = scaler._cell.read()
        if scaler._history.consecutive_skips and scaler._cell.rule.at_floor(state):
            scaler._begin_iteration()
            raise NonFiniteError(_floor_text(state.scale, scaler.last_step))


def _tell_loss(outputs: Any) -> None:
    if isinstance(outputs, Tensor) and outputs.numel() == 1:
        emit("loss", value=outputs.detach())


def _floor_text(scale: float, record: StepRecord) -> str:
    return (
        f"GradScaler needs finite gradients at its smallest scale, but {record.reason} at "
        f"{scale:g}, and min_scale lets it go no lower. {advice(record)}"
    )
