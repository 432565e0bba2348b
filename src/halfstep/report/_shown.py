"""Which tensors and casts of a large model are shown: a page of all of them would not open."""

from collections.abc import Sequence

from halfstep.core import Cast, Range, Report

MOST_TENSORS = 1000
MOST_CASTS = 500
MOST_NAMES = 5


def shown_tensors(report: Report) -> Sequence[Range]:
    """Returns the rows that are shown, in their order: of many, those that are broken or lose most.

    Args:
        report: Whose ranges they are.

    Example:
        >>> shown_tensors(Report(script="a.py", policy="float16"))
        ()
    """
    rows, fault = report.ranges.rows, report.diagnosis.first
    if len(rows) <= MOST_TENSORS:
        return rows
    told = () if fault is None else (fault.module, fault.role)

    def badness(place: int) -> tuple[bool, int, float]:
        row = rows[place]
        is_told = (row.module, row.role) == told
        return is_told, row.run.infs + row.run.nans, report.lost(row)

    worst = sorted(range(len(rows)), key=badness, reverse=True)
    return [rows[place] for place in sorted(worst[:MOST_TENSORS])]


def shown_casts(report: Report) -> Sequence[Cast]:
    """Returns the casts that are shown, the most bytes first.

    Args:
        report: Whose casts they are.

    Example:
        >>> shown_casts(Report(script="a.py", policy="float16"))
        []
    """
    return sorted(report.casts, key=lambda cast: -cast.bytes)[:MOST_CASTS]


def count_text(shown: int, there: int) -> str:
    """Returns how many are shown of how many.

    Example:
        >>> count_text(3, 3), count_text(1000, 40000)
        ('3', '1000 of 40000')
    """
    return f"{there}" if shown == there else f"{shown} of {there}"
