"""What the processor is called."""

import platform
from pathlib import Path

_DESCRIPTION = Path("/proc/cpuinfo")


def processor() -> str:
    """Returns the name of the processor, or its architecture where that is all that is known.

    Example:
        >>> processor() != ""
        True
    """
    try:
        lines = _DESCRIPTION.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
