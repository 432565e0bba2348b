"""What the settings of a loss scale must fulfil."""

import contextlib
import math
import numbers
import struct
from collections.abc import Callable
from typing import Any

from halfstep.errors import ScaleError

FLOAT32_MAX = 3.4028234663852886e38


def float32(value: float) -> float:
    """Rounds to the nearest float32, the type in which every front-end keeps the scale."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def read(name: str, kind: type, value: Any) -> float:
    """Returns a setting as an exact float or int, scales rounded to float32."""
    if kind is int:
        return _whole(name, value)
    number = _finite(name, value)
    return _scale(name, number) if name.endswith("_scale") else number


def _scale(name: str, value: float) -> float:
    rounded = float32(value)
    if rounded == math.inf:
        raise ScaleError(
            f"LossScale needs {name} to fit float32, got {value!r}. Write at most {FLOAT32_MAX!r}."
        )
    return rounded


def _finite(name: str, value: Any) -> float:
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise ScaleError(
            f"LossScale needs {name} to be a finite number, got {value!r}. Write a float."
        )
    return number


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ScaleError(
            f"LossScale needs {name} to be a whole number, got {value!r}. Write an int."
        )
    return int(value)


def check(settings: Any) -> None:
    """Raises an error for the first requirement that the settings do not fulfil."""
    for names, rule, holds, remedy in _REQUIREMENTS:
        if not holds(settings):
            given = ", ".join(f"{name}={getattr(settings, name)!r}" for name in names)
            raise ScaleError(f"LossScale needs {rule}, got {given}. {remedy}")


Requirement = tuple[tuple[str, ...], str, Callable[[Any], bool], str]

# The reciprocal of the scale must be a normal float32 too, and counters are 32-bit integers.
_REQUIREMENTS: tuple[Requirement, ...] = (
    (
        ("growth_factor",),
        "growth_factor >= 1",
        lambda rule: rule.growth_factor >= 1.0,
        "Write 2.0, or 1.0 for a scale that never grows.",
    ),
    (
        ("backoff_factor",),
        "0 < backoff_factor <= 1",
        lambda rule: 0.0 < rule.backoff_factor <= 1.0,
        "Write 0.5, or LossScale.static(...) for a scale that never changes.",
    ),
    (
        ("growth_factor", "backoff_factor"),
        "backoff_factor < 1 where growth_factor > 1",
        lambda rule: rule.growth_factor == 1.0 or rule.backoff_factor < 1.0,
        "Write 0.5, because a scale that only grows never recovers from an overflow.",
    ),
    (
        ("growth_interval",),
        "1 <= growth_interval < 2**31",
        lambda rule: 1 <= rule.growth_interval < 2**31,
        "Write 2000, or growth_factor=1.0 for a scale that never grows.",
    ),
    (
        ("hysteresis",),
        "1 <= hysteresis < 2**31",
        lambda rule: 1 <= rule.hysteresis < 2**31,
        "Write 1 to back off at every overflow.",
    ),
    (
        ("min_scale",),
        "min_scale >= 2**-126",
        lambda rule: rule.min_scale >= 2.0**-126,
        "Write 2.0**-16, below which gradients of float16 gain nothing.",
    ),
    (
        ("min_scale", "init_scale", "max_scale"),
        "min_scale <= init_scale <= max_scale",
        lambda rule: rule.min_scale <= rule.init_scale <= rule.max_scale,
        "Move init_scale between the two, or move the one that is in its way.",
    ),
)
