"""What is told of the numbers of one tensor."""

from halfstep.core import Range, Report
from halfstep.report._numbers import UNKNOWN, number
from halfstep.report._shares import share_text


def is_known(row: Range) -> bool:
    """Returns whether there are magnitudes in float32.

    Where what came back to a model was not finite there are none, and no zero beside inf or NaN
    is told as a magnitude.

    Args:
        row: The numbers of a tensor.

    Example:
        >>> from halfstep.core import Exponents
        >>> zeros, broken = Exponents(zeros=4), Exponents(nans=4)
        >>> [is_known(Range("a", "output", zeros, run)) for run in (zeros, broken)]
        [True, False]
    """
    return row.reference.numbers > 0 or not _broken(row)


def is_broken(report: Report) -> bool:
    """Returns whether anything was inf or NaN as it ran.

    Args:
        report: Whose ranges are looked at.

    Example:
        >>> is_broken(Report(script="a.py", policy="mixed_float16"))
        False
    """
    return any(row.run.infs or row.run.nans for row in report.ranges.rows)


def _broken(row: Range) -> int:
    return sum(each.infs + each.nans for each in (row.run, row.reference))


def largest_text(row: Range) -> str:
    """Returns the largest magnitude, or what there is instead of one.

    Args:
        row: The numbers of a tensor.

    Example:
        >>> from halfstep.core import Exponents
        >>> largest_text(Range("a", "output", Exponents(zeros=4), Exponents(nans=4)))
        'NaN'
    """
    if is_known(row):
        return number(row.reference.largest)
    return "NaN" if row.run.nans or row.reference.nans else "inf"


def zero_text(row: Range) -> str:
    """Returns which part of the numbers is 0, a dash where that is not known.

    Args:
        row: The numbers of a tensor.

    Example:
        >>> from halfstep.core import Exponents
        >>> zeros = Exponents(zeros=4)
        >>> zero_text(Range("a", "output", zeros, zeros))
        '100 %'
    """
    return share_text(row.reference.zero) if is_known(row) else UNKNOWN


def lost_text(report: Report, row: Range, form: str | None = None) -> str:
    """Returns which part of the numbers becomes 0 in a format, a dash where that is not known.

    Args:
        report: Whose row it is.
        row: The numbers of a tensor.
        form: The name of the format, without one that of the report.

    Example:
        >>> from halfstep.core import Exponents
        >>> row = Range("a", "output", Exponents(zeros=4), Exponents(nans=4))
        >>> lost_text(Report(script="a.py", policy="mixed_float16"), row) == UNKNOWN
        True
    """
    return share_text(report.lost(row, form)) if is_known(row) else UNKNOWN


def broken_text(count: int, total: int) -> str:
    """Returns how many numbers are inf, or NaN.

    Args:
        count: How many they are.
        total: Of how many.

    Example:
        >>> broken_text(0, 8), broken_text(3, 8), broken_text(8, 8)
        ('0', '3', 'all 8')
    """
    return f"all {number(count)}" if count and count == total else number(count)
