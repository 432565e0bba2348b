"""Which exponents the numbers of each module have, as rows of a heat map."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from halfstep.core import FORMATS, Format, Magnitudes, Report
from halfstep.report._visible import visible

# In this order they are looked at.
ROLES = {
    "input": "forward",
    "weight": "forward",
    "output": "forward",
    "grad_output": "backward",
    "grad_input": "backward",
    "grad_weight": "backward",
}


def phase(role: str) -> str:
    """Returns the pass in which a tensor of that role is made.

    Example:
        >>> phase("grad_weight"), phase("output")
        ('backward', 'forward')
    """
    return ROLES.get(role, "backward" if role.startswith("grad_") else "forward")


def heat_maps(report: Report) -> list[dict[str, Any]]:
    """Returns a heat map for each role, as JSON types.

    Args:
        report: Whose ranges they are.

    Example:
        >>> from halfstep.core import Exponents
        >>> found = Magnitudes("head", "output", "float16", Exponents({-2: 3, 0: 1}, largest=1.5))
        >>> (each,) = heat_maps(Report(script="a.py", policy="float32", ranges=(found,)))
        >>> each["role"], each["exponents"], each["rows"][0]["counts"]
        ('output', [-2, -1, 0], [3, 0, 1])
    """
    ordered = sorted(report.ranges, key=_place)
    return [_heat_map(role, list(found)) for role, found in groupby(ordered, lambda it: it.role)]


def windows() -> dict[str, dict[str, float]]:
    """Returns where each format ends, as exponents, by its name.

    Example:
        >>> windows()["float16"]["zero"], windows()["float16"]["subnormal"]
        (-25.0, -14.0)
    """
    return {each.name: _window(each) for each in FORMATS}


def _window(each: Format) -> dict[str, float]:
    return {
        # Half of the smallest number is rounded to even, which is 0.
        "zero": math.log2(each.smallest_subnormal) - 1,
        "subnormal": math.log2(each.min_normal),
        "largest": math.log2(each.max),
    }


def _place(found: Magnitudes) -> tuple[int, str]:
    names = list(ROLES)
    return (names.index(found.role) if found.role in names else len(names), found.role)


def _heat_map(role: str, found: Sequence[Magnitudes]) -> dict[str, Any]:
    exponents = _exponents(found)
    return {
        "role": visible(role),
        "phase": phase(role),
        "exponents": exponents,
        "rows": list(_rows(found, exponents)),
    }


def _exponents(found: Sequence[Magnitudes]) -> list[int]:
    there = [exponent for each in found for exponent, _ in each.exponents.counts]
    return list(range(min(there), max(there) + 1)) if there else []


def _rows(found: Sequence[Magnitudes], exponents: Sequence[int]) -> Iterator[dict[str, Any]]:
    for each in found:
        counts = dict(each.exponents.counts)
        yield {
            "module": visible(each.module),
            "dtype": each.dtype,
            "scale": each.power,
            "counts": [counts.get(exponent, 0) for exponent in exponents],
            "total": each.exponents.total,
        }
