"""What the shared cases need from halfstep.torch, through public names only."""

from halfstep.torch import GradScaler, autocast, custom_bwd, custom_fwd

__all__ = ["GradScaler", "autocast", "custom_bwd", "custom_fwd", "skipped"]


def skipped(scaler, optimizer):
    """Did the latest scaler.step(optimizer) leave the parameters alone?"""
    return scaler.last_step_of(optimizer).skipped
