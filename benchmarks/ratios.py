"""What the benchmarks say of ratios, and of the machine that they were measured on."""

import platform
import statistics


def cell(ratios):
    """Returns the median of ratios, with their middle half in brackets."""
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def processor():
    """Returns what the processor is called."""
    return platform.processor() or platform.machine()
