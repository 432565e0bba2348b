"""Writes the state dict of a scaler, and reads it, also PyTorch's."""

import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from halfstep.core import LossScale, ScaleState
from halfstep.errors import MissingKeyError, ScalerStateError, UsageError
from halfstep.torch._scaling._settings import changed_rule, checked_scale

_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")
_NEEDED = ("scale", *_SETTINGS, "_growth_tracker")
_BY = "load_state_dict()"


def saved_state(rule: LossScale, state: ScaleState) -> dict[str, Any]:
    """Returns rule and state in the form of PyTorch, with what it lacks only where that is used.

    Example:
        >>> list(saved_state(LossScale(), ScaleState(8.0)))
        ['scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker']
    """
    settings = {name: getattr(rule, name) for name in _SETTINGS}
    saved = {"scale": state.scale, **settings, "_growth_tracker": state.finite_steps}
    return saved if rule.hysteresis == 1 else {**saved, "_overflows": state.overflows}


def read_state(state_dict: Any, rule: LossScale) -> tuple[LossScale, ScaleState]:
    """Returns the rule and the state that a state dict holds.

    Example:
        >>> saved = {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5}
        >>> read_state(saved | {"growth_interval": 3, "_growth_tracker": 1}, LossScale())[1]
        ScaleState(scale=8.0, finite_steps=1, overflows=0)
    """
    if not isinstance(state_dict, Mapping):
        raise UsageError(
            f"{_BY} needs a state dict, got {type(state_dict).__name__}. Pass what "
            "scaler.state_dict() returned."
        )
    if not state_dict:
        raise ScalerStateError(
            "The source state dict is empty, possibly because it was saved from a disabled "
            "instance of GradScaler. Keep the fresh scaler, or create it with enabled=False."
        )
    saved = {key: _plain(value) for key, value in state_dict.items()}
    _check_keys(saved)
    rule = changed_rule(rule, **{name: saved[name] for name in _SETTINGS})
    scale = checked_scale(saved["scale"], _BY)
    steps = _count(saved, "_growth_tracker")
    return rule, ScaleState(scale, steps, _count(saved, "_overflows"))


def _check_keys(saved: Mapping[str, Any]) -> None:
    missing = [key for key in _NEEDED if key not in saved]
    if missing:
        raise MissingKeyError(
            f"{_BY} needs {', '.join(map(repr, _NEEDED))}, got a state dict without "
            f"{', '.join(map(repr, missing))}. Pass what scaler.state_dict() returned."
        )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _count(saved: Mapping[str, Any], key: str) -> int:
    value = saved.get(key, 0)
    whole = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not whole or not 0 <= value < 2**31 or value != int(value):
        raise UsageError(
            f"{_BY} needs {key!r} to be a whole number >= 0, got {value!r}. Pass what "
            "scaler.state_dict() returned."
        )
    return int(value)
