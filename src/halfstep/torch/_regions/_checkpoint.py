"""The state of a region's scale, as plain numbers."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from halfstep.core import Rule
from halfstep.errors import MissingKeyError, UsageError
from halfstep.torch._regions._state import PROVEN, Cells, numbers

_KEYS = Cells._fields
_RULES = "widened"
# What a GradScaler calls the counters, and that its scale is a proven one; the rest are settings.
_OF_SCALER = {"_growth_tracker": "finite_steps", "_overflows": "overflows"}
_PROVEN = dict.fromkeys(_KEYS, 0.0) | {"proof": float(PROVEN)}


def saved(cells: Cells) -> dict[str, float]:
    """Returns the state as numbers.

    Example:
        >>> import torch
        >>> saved(Cells(torch.tensor(8.0), *torch.zeros(6)))["scale"]
        8.0
    """
    return dict(zip(_KEYS, numbers(cells), strict=True))


def saved_rules(rules: tuple[Rule, ...]) -> dict[str, list[dict[str, Any]]]:
    """Returns rules as plain data, nothing where there are none.

    Example:
        >>> saved_rules(())
        {}
    """
    return {_RULES: [each.to_dict() for each in rules]} if rules else {}


def rules_in(state_dict: Any) -> tuple[Rule, ...]:
    """Returns the rules that `saved_rules` saved."""
    rows = state_dict.get(_RULES, ()) if isinstance(state_dict, Mapping) else ()
    if not isinstance(rows, (list, tuple)):
        raise UsageError(
            f"load_state_dict() needs {_RULES!r} to be a list of rules, got {rows!r}. Pass what "
            "region.state_dict() returned."
        )
    return tuple(Rule.from_dict(each) for each in rows)


def load(cells: Cells, state_dict: Any) -> None:
    """Puts what `saved` returned, or the state of a GradScaler, into the cells."""
    values = _checked(state_dict)
    if "_growth_tracker" in state_dict:
        # A scaler has counted its latest iteration; a pass is counted when the next one begins.
        values["finite_steps"] -= 1
    for key, cell in zip(_KEYS, cells, strict=True):
        cell.fill_(values[key])


def _checked(state_dict: Any) -> dict[str, float]:
    if not isinstance(state_dict, Mapping):
        raise UsageError(
            f"load_state_dict() needs a state dict, got {type(state_dict).__name__}. Pass what "
            "region.state_dict() returned."
        )
    named: dict[Any, Any] = {_OF_SCALER.get(key, key): value for key, value in state_dict.items()}
    if "_growth_tracker" in state_dict:
        named = {**_PROVEN, **named}
    missing = [key for key in _KEYS if key not in named]
    if missing:
        raise MissingKeyError(
            f"load_state_dict() needs {', '.join(map(repr, _KEYS))}, got a state dict without "
            f"{', '.join(map(repr, missing))}. Pass what region.state_dict() returned."
        )
    return {key: _number(key, named[key]) for key in _KEYS}


def _number(key: str, value: Any) -> float:
    value = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not _FITS[key](float(value)):
        raise UsageError(
            f"load_state_dict() needs {key!r} to be {_NEEDS[key]}, got {value!r}. Pass what "
            "region.state_dict() returned."
        )
    return float(value)


def _is_scale(value: float) -> bool:
    return math.isfinite(value) and value > 0.0


def _is_count(value: float) -> bool:
    return -1 <= value < 2**31 and value == int(value)


_FITS = dict.fromkeys(_KEYS[1:], _is_count) | {"scale": _is_scale}
_NEEDS = dict.fromkeys(_KEYS[1:], "a whole number") | {"scale": "a finite number > 0"}
