"""Which part of a tensor's numbers a format would lose."""

from halfstep.core import Range

LOW_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_TINY = 1e-4


def shares_lost(found: Range) -> dict[str, float]:
    """Returns the fraction of the numbers that become 0, by the formats for which it is known.

    Example:
        >>> shares_lost(Range("head", "grad_weight", "float16", lost=(("float16", 0.25),)))
        {'float16': 0.25}
    """
    return dict(found.lost)


def share_text(share: float) -> str:
    """Returns a fraction in percent, with no more digits than one looks at.

    Example:
        >>> share_text(0.0), share_text(0.12345), share_text(1e-6), share_text(1.0)
        ('0 %', '12.3 %', '< 0.01 %', '100 %')
    """
    if 0 < share < _TINY:
        return f"< {100 * _TINY:g} %"
    return f"{100 * share:.3g} %"
