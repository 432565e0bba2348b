"""Times calls in several formats, which take turns, within a limit."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from halfstep.core._auto import FamilyTimes

LIMIT = 2.0  # seconds

# Of this many readings the shortest counts, and of fewer than a few none.
_ROUNDS = 8
_LEAST = 3
# What takes that many times as long as float32 is not timed any further after a few readings, and
# after one if it is that many times, and longer than the machine leaves a process alone.
_HOPELESS = 2.0
_FEW = 6
_FAR = 10.0
_LONG = 0.02
# Seconds that a reading lasts at least, so that the clock's grain does not matter, and hardly
# longer, so that some are over before the machine does something else.
_ENOUGH = 0.0005
_MOST = 32
_GRAIN = 1e-9
# How much of the time that is left a family may take.
_SHARE = 0.65

Call = Callable[[], object]


class Entry(NamedTuple):
    """What a call is timed for.

    Args:
        family: The family of the operation.
        size: "small" or "large".
        dtype: The format.

    Example:
        >>> Entry("matmul", "large", "bfloat16").dtype
        'bfloat16'
    """

    family: str
    size: str
    dtype: str


def begun(calls: Mapping[Entry, Call]) -> Mapping[Entry, Call]:
    """Returns calls that were made once, side by side, so that all that they need is compiled.

    Args:
        calls: The calls.

    Example:
        >>> begun({})
        {}
    """
    with ThreadPoolExecutor() as pool:
        # A format may lack a kernel: what fails here fails again, where it is expected.
        for each in [pool.submit(call) for call in calls.values()]:
            each.exception()
    return calls


class Race:
    """Times calls, and stops at a limit.

    Args:
        calls: What is timed, for each family and size float32 first.
        wait: Waits until the device has done what it was called for.
        clock: What the time is, in seconds.
        limit: How many seconds it may take; a call that has begun is not interrupted.

    Example:
        >>> entries = [Entry("matmul", "large", dtype) for dtype in ("float32", "bfloat16")]
        >>> times, = Race({each: lambda: None for each in entries}).times()
        >>> times.float32 < 1.0, times.float16
        (True, inf)
    """

    def __init__(
        self,
        calls: Mapping[Entry, Call],
        wait: Call = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        limit: float = LIMIT,
    ) -> None:
        self._calls, self._wait, self._clock = calls, wait, clock
        self._end = clock() + limit
        self._readings: dict[Entry, list[float]] = {entry: [] for entry in calls}

    def times(self) -> tuple[FamilyTimes, ...]:
        """Returns the shortest time of each call, inf of those that could not be timed.

        Example:
            >>> Race({}).times()
            ()
        """
        groups = dict.fromkeys((entry.family, entry.size) for entry in self._calls)
        for group in groups:
            # What comes first matters most, but is not to leave nothing where time is short.
            share = _SHARE * (self._end - self._clock())
            self._run(self._of(*group), self._clock() + share)
        return tuple(FamilyTimes(*group, **self._shortest(self._of(*group))) for group in groups)

    def _of(self, family: str, size: str) -> list[Entry]:
        return [each for each in self._calls if (each.family, each.size) == (family, size)]

    def _run(self, entries: Sequence[Entry], end: float) -> None:
        wide, *others = entries
        first = {wide: self._first(wide, end)}
        # One by one, so that what is slow takes no time from what is not.
        for other in others:
            first[other] = self._first(other, end)
            for _ in range(_ROUNDS):
                for each in (wide, other):
                    if self._is_open(each, first[each], end):
                        self._read(each, first[each])

    def _is_open(self, entry: Entry, first: float, end: float) -> bool:
        return math.isfinite(first) and self._clock() < end and not self._is_slow(entry)

    def _first(self, entry: Entry, end: float) -> float:
        """Returns how long the first call takes, which is that of no other one."""
        # A format may lack a kernel, which each framework tells by an error of its own.
        with contextlib.suppress(Exception):
            if self._clock() < end:
                return self._seconds(entry, 1)
        return math.inf

    def _read(self, entry: Entry, first: float) -> None:
        seconds = min((first, *self._readings[entry]))
        times = round(_ENOUGH / seconds)
        self._readings[entry].append(self._seconds(entry, max(1, min(_MOST, times))))

    def _is_slow(self, entry: Entry) -> bool:
        """Returns whether enough is known of something that is slow."""
        own, wide = self._readings[entry], self._readings[entry._replace(dtype="float32")]
        if not own or not wide:
            return False
        limit = _HOPELESS if len(own) >= _FEW else _FAR
        enough = len(own) >= _FEW or min(own) >= _LONG
        return enough and min(own) > limit * min(wide)

    def _seconds(self, entry: Entry, times: int) -> float:
        begin = self._clock()
        for _ in range(times):
            self._calls[entry]()
        self._wait()
        return max(self._clock() - begin, _GRAIN) / times

    def _shortest(self, entries: Sequence[Entry]) -> dict[str, Any]:
        known = [e for e in entries if len(self._readings[e]) >= _LEAST or self._is_slow(e)]
        return {each.dtype: min(self._readings[each]) for each in known}
