"""Which exponents the numbers of each module have, as rows of a heat map."""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from halfstep.core import (
    BACKWARD,
    FORMATS,
    FORWARD,
    LOW_FORMATS,
    Fault,
    Format,
    Range,
    Report,
)
from halfstep.report._visible import visible

# In this order they are looked at.
_ROLES = (*FORWARD, *BACKWARD)


def phase(role: str) -> str:
    """Returns the pass in which a tensor of that role is made.

    Example:
        >>> phase("grad_weight"), phase("output")
        ('backward', 'forward')
    """
    return "backward" if role in BACKWARD else "forward"


def heat_maps(report: Report) -> list[dict[str, Any]]:
    """Returns a heat map for each role, as JSON types.

    Args:
        report: Whose ranges they are.

    Example:
        >>> from halfstep.core import Exponents, Ranges
        >>> found = Exponents({-2: 3, 0: 1}, largest=1.5)
        >>> ranges = Ranges((Range("head", "output", found, found),))
        >>> (each,) = heat_maps(Report(script="a.py", policy="float32", ranges=ranges))
        >>> each["role"], each["exponents"], each["rows"][0]["counts"]
        ('output', [-2, -1, 0], [3, 0, 1])
    """
    ordered = sorted(report.ranges.rows, key=_place)
    maps = groupby(ordered, lambda row: row.role)
    return [_heat_map(report, role, list(rows)) for role, rows in maps]


def opened(report: Report, maps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what to begin with: a heat map with something to see, and the format to compare with.

    Args:
        report: Whose heat maps they are.
        maps: What `heat_maps` returned.

    Returns:
        The place of the map as "role"; as "format" that of the first fault, where its tensor was in
        a wider one before, else "own", the one in use.

    Example:
        >>> from halfstep.core import Exponents, Ranges
        >>> lost, found = Exponents(nans=4), Exponents({0: 4}, largest=1.5)
        >>> rows = Range("head", "output", found, found), Range("head", "grad_output", lost, lost)
        >>> report = Report(script="a.py", policy="float32", ranges=Ranges(rows))
        >>> opened(report, heat_maps(report))
        {'role': 0, 'format': 'own'}
    """
    fault = report.diagnosis.first
    wanted = ("grad_output", "output") if fault is None else (visible(fault.role), "output")
    seen = {each["role"]: place for place, each in enumerate(maps) if each["exponents"]}
    chosen = next((seen[role] for role in (*wanted, *seen) if role in seen), 0)
    forms = {row.form for row in report.ranges.rows if _is_of(fault, row)}
    is_cast = fault is not None and forms == {"float32"} and fault.dtype in LOW_FORMATS
    return {"role": chosen, "format": fault.dtype if fault and is_cast else "own"}


def _is_of(fault: Fault | None, row: Range) -> bool:
    return fault is not None and (row.module, row.role) == (fault.module, fault.role)


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


def _place(row: Range) -> tuple[int, str]:
    known = row.role in _ROLES
    return (_ROLES.index(row.role) if known else len(_ROLES), row.role)


def _heat_map(report: Report, role: str, rows: Sequence[Range]) -> dict[str, Any]:
    exponents = _exponents(rows)
    return {
        "role": visible(role),
        "phase": phase(role),
        "exponents": exponents,
        "rows": [_row(report, row, exponents) for row in rows],
    }


def _exponents(rows: Sequence[Range]) -> list[int]:
    there = [exponent for row in rows for exponent, _ in row.reference.counts]
    return list(range(min(there), max(there) + 1)) if there else []


def _row(report: Report, row: Range, exponents: Sequence[int]) -> dict[str, Any]:
    counts = dict(row.reference.counts)
    return {
        "module": visible(row.module),
        "dtype": row.form,
        "scale": report.power_of(row),
        "counts": [counts.get(exponent, 0) for exponent in exponents],
        "total": row.reference.total,
        "infs": row.run.infs,
        "nans": row.run.nans,
        "ran": row.run.total,
    }
