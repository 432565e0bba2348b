"""Times calls in several formats, which take turns, within a limit."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from halfstep.core._auto import FamilyTimes

LIMIT = 2.0  # seconds

_ROUNDS = 12
# What takes that many times as long as float32 at first is not called again.
_FAR = 10.0
# What takes that many times as long is not timed any further.
_HOPELESS = 2.0
_ENOUGH = 0.002  # seconds that one reading should last, so that the clock's grain does not matter
_MOST = 32

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
        self._best: dict[Entry, float] = {}

    def times(self) -> tuple[FamilyTimes, ...]:
        """Returns the shortest time of each call, inf of those that could not be made.

        Example:
            >>> Race({}).times()
            ()
        """
        for entry in self._calls:
            self._start(entry)
        for _ in range(_ROUNDS):
            for entry in self._calls:
                if self._is_open(entry):
                    self._best[entry] = min(self._best[entry], self._reading(entry))
        return self._summary()

    def _start(self, entry: Entry) -> None:
        """Calls something for the first time, and once more if that was not far too slow."""
        # A format may lack a kernel, which each framework tells by an error of its own.
        with contextlib.suppress(Exception):
            for _ in range(2):
                if self._has_time() and self._best.get(entry, 0.0) <= _FAR * self._wide(entry):
                    self._best[entry] = self._seconds(entry, 1)

    def _is_open(self, entry: Entry) -> bool:
        hopeful = self._best.get(entry, math.inf) <= _HOPELESS * self._wide(entry)
        return entry in self._best and hopeful and self._has_time()

    def _wide(self, entry: Entry) -> float:
        return self._best.get(entry._replace(dtype="float32"), math.inf)

    def _has_time(self) -> bool:
        return self._clock() < self._end

    def _reading(self, entry: Entry) -> float:
        times = round(_ENOUGH / max(self._best[entry], 1e-7))
        return self._seconds(entry, max(1, min(_MOST, times)))

    def _seconds(self, entry: Entry, times: int) -> float:
        begin = self._clock()
        for _ in range(times):
            self._calls[entry]()
        self._wait()
        return (self._clock() - begin) / times

    def _summary(self) -> tuple[FamilyTimes, ...]:
        groups = dict.fromkeys((each.family, each.size) for each in self._calls)
        return tuple(FamilyTimes(*group, **self._of(group)) for group in groups)

    def _of(self, group: tuple[str, str]) -> dict[str, float]:
        return {e.dtype: seconds for e, seconds in self._best.items() if e[:2] == group}
