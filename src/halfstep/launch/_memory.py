"""How much memory this process holds."""

import contextlib
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class MemoryGrowth:
    """The growth of this process's peak resident memory, from the moment this is made."""

    kind = "growth of the process"

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            _CLEAR.write_text(_RESET_PEAK)
        self._before = _resident("VmRSS:") or _peak()

    def bytes(self) -> int | None:
        """Returns the growth so far, None where the system does not tell."""
        peak = _peak()
        return None if peak is None or self._before is None else max(0, peak - self._before)


def _peak() -> int | None:
    return _resident("VmHWM:") or _rusage_peak()


def _resident(field: str) -> int | None:
    # Not getrusage: on Linux its peak also counts the parent that this process was forked from.
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def _rusage_peak() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
