"""The settings of a scaler: checked when given, and readable under PyTorch's names."""

import numbers
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.core import LossScale, overriding_policy
from halfstep.errors import UsageError
from halfstep.torch._scale_cell import ScaleCell


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


def checked_limit(max_consecutive_skips: int | None) -> int | None:
    """Returns a limit of skipped steps if it is one."""
    limit = max_consecutive_skips
    if limit is None or (isinstance(limit, numbers.Integral) and int(limit) >= 1):
        return limit
    raise UsageError(
        f"GradScaler needs max_consecutive_skips >= 1 or None, got {limit!r}. Write 100, say."
    )


def loss_scale(enabled: bool, **settings: Any) -> LossScale:
    """Returns the rule of the settings, unless a policy of the whole process has another one.

    Example:
        >>> str(loss_scale(True, init_scale=2.0**-20, min_scale=2.0**-16))
        'dynamic(init_scale=9.5367431640625e-07, min_scale=9.5367431640625e-07)'
    """
    policy = overriding_policy()
    if policy is not None:
        return policy.scale
    if not enabled:
        return LossScale.none()
    default = LossScale()
    if settings["min_scale"] == default.min_scale and 0 < settings["init_scale"] < 2.0**-16:
        # Nobody asked for the default floor: a smaller initial scale brings its own.
        settings["min_scale"] = settings["init_scale"]
    return LossScale(**settings)


def _of_rule(name: str) -> property:
    def get(self: "RuleSettings") -> Any:
        return getattr(self._cell.rule, name)

    def put(self: "RuleSettings", value: Any) -> None:
        self._cell.rule = replace(self._cell.rule, **{name: value})

    return property(get, put)


class RuleSettings:
    """The getters, setters and attributes through which PyTorch's users reach the settings."""

    _cell: ScaleCell
    _growth_factor = _of_rule("growth_factor")
    _backoff_factor = _of_rule("backoff_factor")
    _growth_interval = _of_rule("growth_interval")

    def get_growth_factor(self) -> float:
        """Returns what the scale is multiplied by when it grows."""
        return self._cell.rule.growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by when it grows."""
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Returns what the scale is multiplied by after an overflow."""
        return self._cell.rule.backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Sets what the scale is multiplied by after an overflow."""
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Returns how many finite steps in a row it takes to grow."""
        return self._cell.rule.growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Sets how many finite steps in a row it takes to grow."""
        self._growth_interval = new_interval

    @property
    def _scale(self) -> Tensor | None:
        return self._cell.scale

    @_scale.setter
    def _scale(self, scale: Tensor | None) -> None:
        self._cell.scale = scale

    @property
    def _growth_tracker(self) -> Tensor | None:
        return self._cell.tracker

    @_growth_tracker.setter
    def _growth_tracker(self, tracker: Tensor | None) -> None:
        self._cell.tracker = tracker

    @property
    def _init_scale(self) -> float:
        return self._cell.initial.scale

    @_init_scale.setter
    def _init_scale(self, scale: float) -> None:
        self._cell.initial = self._cell.initial._replace(scale=scale)

    @property
    def _init_growth_tracker(self) -> int:
        return self._cell.initial.finite_steps

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, steps: int) -> None:
        self._cell.initial = self._cell.initial._replace(finite_steps=steps)
