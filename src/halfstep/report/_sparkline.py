"""A curve in one line of text."""

import math
from collections.abc import Sequence
from itertools import pairwise

_LEVELS = "▁▂▃▄▅▆▇█"
_ASCII_LEVELS = "_.,-=+*#"
_NON_FINITE = "!"


def sparkline(
    values: Sequence[float],
    *,
    width: int = 16,
    limits: tuple[float, float] | None = None,
    ascii_only: bool = False,
) -> str:
    """Returns the values as a row of small bars, `!` where one of them is Inf or NaN.

    Args:
        values: The curve, oldest first.
        width: The most characters to use; neighbours are averaged to fit.
        limits: The values of the lowest and the highest bar, so that several curves share a
            scale. What lies beyond is drawn at the edge. Without it, the curve's own extremes.
        ascii_only: Whether to keep to characters that every terminal has.

    Example:
        >>> sparkline([4.0, 3.0, 2.0, 1.0])
        '█▆▃▁'
        >>> sparkline([1.0, float("nan")])
        '▁!'
    """
    points = _buckets(values, width)
    low, high = limits or finite_limits(points)
    levels = _ASCII_LEVELS if ascii_only else _LEVELS
    return "".join(_bar(point, low, high, levels) for point in points)


def finite_limits(values: Sequence[float]) -> tuple[float, float]:
    """Returns the smallest and the largest finite value, (0, 0) where there is none.

    Example:
        >>> finite_limits([2.0, float("inf"), 1.0])
        (1.0, 2.0)
    """
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else (0.0, 0.0)


def _buckets(values: Sequence[float], width: int) -> list[float]:
    count = min(width, len(values))
    edges = [len(values) * index // count for index in range(count + 1)] if count else []
    return [_mean(values[start:stop]) for start, stop in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)


def _bar(value: float, low: float, high: float, levels: str) -> str:
    if not math.isfinite(value):
        return _NON_FINITE
    if high <= low:
        return levels[0]
    position = (value - low) / (high - low)
    return levels[round(min(1.0, max(0.0, position)) * (len(levels) - 1))]
