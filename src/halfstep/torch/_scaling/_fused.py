"""Steps optimizers that unscale and skip by themselves, in the protocol of PyTorch.

Such an optimizer finds the scale in its attribute `grad_scale` and the outcome of the check in
`found_inf`, and its kernel skips the update without anybody waiting for the device.
"""

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.core import levels_to_user
from halfstep.errors import UsageError
from halfstep.torch._scaling._clipped_step import Clipping
from halfstep.torch._scaling._iteration import (
    State,
    finish,
    found_late,
    founds_of,
    is_bad,
    known_bad,
    total,
)
from halfstep.torch._scaling._master import has_half, step_optimizer
from halfstep.torch._scaling._optimizers import lacks_state, takes_scaler
from halfstep.torch._scaling._records import skipped_record, taken_record, unknown_record
from halfstep.torch._scaling._steps import EMPTY, LATE
from halfstep.torch._scaling._widening import narrow_gradients

if TYPE_CHECKING:
    from halfstep.torch._scaler import GradScaler


def step_fused(
    scaler: "GradScaler",
    optimizer: Optimizer,
    state: State,
    args: Any,
    kwargs: Any,
    max_norm: float | None,
) -> Any:
    """Steps an optimizer whose kernel knows what to do with a scale."""
    kind: Any = type(optimizer)
    if takes_scaler(kind):
        _refuse_old(kind, max_norm)
        return _step_with_scaler(scaler, optimizer, state, args, kwargs)
    clipping = Clipping(scaler, optimizer, state, max_norm)
    by = clipping.by_kernel()
    late = [] if by is not None else _check(scaler, optimizer, state)
    clipping.of_unscaled()
    founds = founds_of([state])
    if not founds:
        finish(scaler, optimizer, skipped_record(scaler._facts(), optimizer, EMPTY))
        return None
    found = total([*founds, *late], scaler._cell.device)
    if _is_known_bad(optimizer, found):
        reason = LATE if late and not is_bad(state) else ""
        finish(scaler, optimizer, skipped_record(scaler._facts(), optimizer, reason))
        return None
    optimizer.grad_scale = _scale_for(scaler, optimizer, state, by)  # type: ignore[attr-defined]
    optimizer.found_inf = found  # type: ignore[attr-defined]
    try:
        result = step_optimizer(optimizer, args, kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    _finish(scaler, optimizer, found)
    return result


def _is_known_bad(optimizer: Optimizer, found: Tensor) -> bool:
    """Returns whether the host can skip the step, and waits for the device where it must.

    A kernel that skips its first step may leave state behind that it never wrote to.
    """
    return (found.is_cpu or lacks_state(optimizer)) and bool(found.item())


def _check(scaler: "GradScaler", optimizer: Optimizer, state: State) -> list[Tensor]:
    """Checks gradients; returns what was found in those that changed after unscale_()."""
    if state["stage"] is not OptState.READY:
        return [] if known_bad([state]) else [*found_late(scaler, optimizer, state).values()]
    state["in_step"] = True
    # The kernels do not look at what they unscale: a product that may overflow is made here.
    if scaler._cell.may_be_below_one() or has_half(optimizer):
        scaler.unscale_(optimizer)
    else:
        scaler._check_inf_per_device(optimizer)
    return []


def _scale_for(
    scaler: "GradScaler", optimizer: Optimizer, state: State, by: Tensor | None
) -> Tensor | None:
    given: Tensor | None = getattr(optimizer, "grad_scale", None)
    if state["stage"] is not OptState.READY:
        return given
    scale, _ = scaler._check_scale_growth_tracker("step")
    for factor in (by, given):
        scale = scale if factor is None else scale * factor.to(scale.device, non_blocking=True)
    return scale


def _finish(scaler: "GradScaler", optimizer: Optimizer, found: Tensor) -> None:
    if not found.is_cpu:
        # Now, because the record will ask whether these are the gradients it knew.
        narrow_gradients(scaler._per_optimizer_states[id(optimizer)]["widened"])
        record = unknown_record(scaler._facts(), optimizer, found)
    elif found.item():
        record = skipped_record(scaler._facts(), optimizer)
    else:
        record = taken_record(scaler._facts())
    finish(scaler, optimizer, record)


def _refuse_old(kind: Any, max_norm: float | None) -> None:
    if max_norm is not None:
        raise UsageError(
            f"GradScaler.step(max_norm=...) needs an optimizer that reads its attribute "
            f"grad_scale, got {kind.__name__}, whose step() takes a grad_scaler. Call unscale_() "
            "and torch.nn.utils.clip_grad_norm_() before step()."
        )


def _step_with_scaler(
    scaler: "GradScaler", optimizer: Optimizer, state: State, args: Any, kwargs: Any
) -> Any:
    """Steps an optimizer of the older protocol, which calls the scaler's methods itself."""
    warnings.warn(
        "The optimizer's step() takes a grad_scaler, which PyTorch is going to stop passing. "
        "Read the attributes grad_scale and found_inf of the optimizer instead.",
        FutureWarning,
        stacklevel=levels_to_user(),
    )
    result = optimizer.step(*args, **{**kwargs, "grad_scaler": scaler})
    founds = founds_of([state])
    if founds:
        _finish(scaler, optimizer, total(founds, scaler._cell.device))
    else:
        finish(scaler, optimizer, taken_record(scaler._facts()))
    return result
