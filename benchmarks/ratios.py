"""What the benchmarks say of ratios, and of the machine that they were measured on."""

import statistics

from halfstep.core import processor

__all__ = ["cell", "processor"]


def cell(ratios):
    """Returns the median of ratios, with their middle half in brackets where there are several."""
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"
