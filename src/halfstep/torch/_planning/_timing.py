"""Times calls that take turns, so that a slow spell of the machine hits all of them."""

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

_ENOUGH = 0.003  # seconds that one reading should last, so that the clock's grain does not matter
_MOST = 64


Call = Callable[[], object]
# What holds while a call has its turn, and the call.
Turn = Callable[[], contextlib.AbstractContextManager[Call]]


class Spent(NamedTuple):
    """How long a call takes.

    Args:
        seconds: The median.
        spread: Half of the range of the middle half.
        readings: How many there were.
    """

    seconds: float
    spread: float
    readings: int = 1

    @property
    def noise(self) -> float:
        """By how many seconds the median may well be wrong."""
        return self.spread / math.sqrt(self.readings)


def alternate(
    turns: Sequence[Turn], device_type: str, budget: float, *, least: int = 3
) -> list[Spent]:
    """Returns how long a call of each takes.

    Args:
        turns: What is timed.
        device_type: Where they compute.
        budget: The seconds that it may take, all in all.
        least: How many readings there are at least.
    """
    wait = _wait(device_type)
    repeats = [_repeats(_reading(each, 1, wait)) for each in turns]
    readings: list[list[float]] = [[] for _ in turns]
    end = time.perf_counter() + budget
    while len(readings[0]) < least or (time.perf_counter() < end and len(readings[0]) < _MOST):
        for turn, times, found in zip(turns, repeats, readings, strict=True):
            found.append(_reading(turn, times, wait))
    return [_summary(each) for each in readings]


def at_a_glance(turn: Turn, device_type: str, limit: float = math.inf) -> Spent:
    """Returns about how long a call takes: the shorter of two readings.

    Args:
        turn: What is timed.
        device_type: Where it computes.
        limit: A first call that takes longer is the only one.
    """
    wait = _wait(device_type)
    with turn() as call:
        first = _seconds(call, 1, wait)
    if first > limit:
        return Spent(first, 0.0)
    return Spent(min(_reading(turn, 1, wait) for _ in range(2)), 0.0)


def _repeats(seconds: float) -> int:
    """Returns how many calls make a reading."""
    return max(1, min(_MOST, round(_ENOUGH / max(seconds, 1e-7))))


def _reading(turn: Turn, times: int, wait: Callable[[], None]) -> float:
    """Returns how long a call takes; the first one warms up, and does not count."""
    with turn() as call:
        call()
        return _seconds(call, times, wait)


def _seconds(call: Call, times: int, wait: Callable[[], None]) -> float:
    wait()
    begin = time.perf_counter()
    for _ in range(times):
        call()
    wait()
    return (time.perf_counter() - begin) / times


def plainly(call: Call) -> Turn:
    """Returns a turn in which a call needs nothing around it."""
    return lambda: contextlib.nullcontext(call)


def _summary(readings: list[float]) -> Spent:
    low, middle, high = statistics.quantiles(readings, n=4)
    return Spent(middle, (high - low) / 2, len(readings))


def _wait(device_type: str) -> Callable[[], None]:
    if device_type == "cpu":
        return lambda: None
    return torch.accelerator.synchronize
