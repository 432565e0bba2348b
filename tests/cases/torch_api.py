"""What the shared cases need from halfstep.torch, through public names only."""

from torch.optim.swa_utils import get_ema_multi_avg_fn

from halfstep import Rules
from halfstep.torch import (
    AveragedModel,
    GradScaler,
    autocast,
    custom_bwd,
    custom_fwd,
    keep_masters,
)
from halfstep.torch import diagnose as diagnose_step

__all__ = [
    "GradScaler",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "ema",
    "fp32_rule",
    "master_optimizer",
    "skipped",
]


def master_optimizer(optimizer):
    """The same optimizer, which keeps float32 masters of low-precision parameters."""
    keep_masters(optimizer)
    return optimizer


def ema(model, decay):
    """An average with update(model) and .module."""
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    averaged.update_parameters(model)
    averaged.update = averaged.update_parameters
    return averaged


def skipped(scaler, optimizer):
    """Did the latest scaler.step(optimizer) leave the parameters alone?"""
    return scaler.last_step_of(optimizer).skipped


def fp32_rule(*names):
    """A context whose regions run these operations in float32."""
    rules = Rules()
    for name in names:
        rules = rules.with_rule(f"aten::{name}", "full", reason="Asked for by the case.")
    return autocast(enabled=False, rules=rules)


def diagnose(model, run):
    """The first fault of run(), one step's loss, as a dict; an empty one where there is none."""
    fault = diagnose_step(model, None, lambda model, batch: run()).first
    if fault is None:
        return {}
    names = {"module": "module", "op": "operation", "phase": "phase", "kind": "kind"}
    return {name: getattr(fault, field) for name, field in names.items()}
