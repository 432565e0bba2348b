"""Checks what a scaler is given as settings."""

import contextlib
import numbers
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.core import Auto, LossScale, Policy, is_auto, overriding_policy
from halfstep.errors import ScaleError, UsageError
from halfstep.torch._auto import settled
from halfstep.torch._scaling._scale_cell import FLOAT32_MAX


def device_type(device: str | torch.device | None) -> str:
    """Returns the type of a device, by default of the current accelerator or else the CPU.

    Example:
        >>> device_type("cuda:1")
        'cuda'
    """
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"GradScaler needs a device such as 'cuda' or 'cpu', got {device!r}. Leave it out for "
            "the current accelerator."
        ) from error


def is_distributed() -> bool:
    """Returns whether other processes train the same parameters."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size() > 1


def checked_limit(max_consecutive_skips: int | None) -> int | None:
    """Returns a limit of skipped steps if it is one."""
    limit = max_consecutive_skips
    if limit is None or (isinstance(limit, numbers.Integral) and int(limit) >= 1):
        return limit
    raise UsageError(
        f"GradScaler needs max_consecutive_skips >= 1 or None, got {limit!r}. Write 100, say."
    )


def loss_scale(device: str, enabled: bool, **settings: Any) -> tuple[LossScale, bool]:
    """Returns the rule of the settings and whether to scale, unless a policy decides both.

    Example:
        >>> rule, enabled = loss_scale("cpu", True, init_scale=2.0**-20, min_scale=2.0**-16)
        >>> str(rule)
        'dynamic(init_scale=9.5367431640625e-07, min_scale=9.5367431640625e-07)'
    """
    wins = overriding_policy()
    if wins is not None:
        scale = _scale_of(wins, device)
        return scale, scale.kind != "none"
    if not enabled:
        return LossScale.none(), False
    first = settings["init_scale"]
    small = isinstance(first, numbers.Real) and 0.0 < float(first) < 2.0**-16
    if small and settings["min_scale"] == LossScale().min_scale:
        # Nobody asked for the default floor: a smaller initial scale brings its own.
        settings["min_scale"] = first
    with _named_after_the_scaler():
        return LossScale(**settings), True


def _scale_of(policy: Policy | Auto, device: str) -> LossScale:
    """Returns the scale of a policy; what `auto` needs at most, where CUDA is not to be started."""
    if is_auto(policy) and device == "cuda" and not torch.cuda.is_initialized():
        return LossScale.dynamic()
    return settled(policy, device).scale


def changed_rule(rule: LossScale, **settings: Any) -> LossScale:
    """Returns a rule with other settings, or says what the scaler needs."""
    with _named_after_the_scaler():
        return replace(rule, **settings)


@contextlib.contextmanager
def _named_after_the_scaler() -> Iterator[None]:
    try:
        yield
    except ScaleError as error:
        raise ScaleError(str(error).replace("LossScale needs", "GradScaler needs", 1)) from None


def scale_within(rule: LossScale, scale: Any, by: str) -> float:
    """Returns a scale that somebody wants to set, if the limits of the scaler allow it."""
    number = checked_scale(scale, by)
    if not rule.min_scale <= number <= rule.max_scale:
        raise ScaleError(
            f"{by} needs min_scale <= new_scale <= max_scale, got new_scale={number!r} with "
            f"min_scale={rule.min_scale!r} and max_scale={rule.max_scale!r}. Create the GradScaler "
            "with limits that hold it."
        )
    return number


def checked_scale(scale: Any, by: str) -> float:
    """Returns a scale that somebody wants to set, if it can be one."""
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or scale.requires_grad:
            raise UsageError(
                f"{by} needs a tensor of one element without requires_grad, got shape "
                f"{tuple(scale.shape)} and requires_grad={scale.requires_grad}. Pass a float."
            )
        scale = scale.item()
    number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not number or not 0.0 < float(scale) <= FLOAT32_MAX:
        raise ScaleError(
            f"{by} needs a scale that is a finite number above 0, got {scale!r}. Pass for example "
            "65536.0."
        )
    return float(scale)
