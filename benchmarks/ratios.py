"""What the benchmarks say of ratios, and of the machine that they were measured on."""

import platform
import re
import statistics
from pathlib import Path

_DESCRIPTION = Path("/proc/cpuinfo")


def cell(ratios):
    """Returns the median of ratios, with their middle half in brackets where there are several."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def processor():
    """Returns what the processor is called."""
    text = _DESCRIPTION.read_text() if _DESCRIPTION.exists() else ""
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()
