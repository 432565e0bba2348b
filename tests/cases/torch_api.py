"""What the shared cases need from halfstep.torch, through public names only."""

from halfstep import Rules
from halfstep.torch import GradScaler, autocast, custom_bwd, custom_fwd

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "fp32_rule", "skipped"]


def skipped(scaler, optimizer):
    """Did the latest scaler.step(optimizer) leave the parameters alone?"""
    return scaler.last_step_of(optimizer).skipped


def fp32_rule(*names):
    """A context whose regions run these operations in float32."""
    rules = Rules()
    for name in names:
        rules = rules.with_rule(f"aten::{name}", "full", reason="Asked for by the case.")
    return autocast(enabled=False, rules=rules)
