"""Numbers as a reader wants them."""

import math

UNKNOWN = "\N{EN DASH}"
ASCII_UNKNOWN = "-"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float, digits: int = 4) -> str:
    """Returns the value with so many significant digits and no needless exponent.

    Example:
        >>> number(0.123456), number(65536.0), number(12345678.0), number(float("nan"))
        ('0.1235', '65536', '1.235e+07', 'nan')
    """
    if math.isfinite(value) and value == round(value) and abs(value) < 1e7:
        return str(round(value))
    return f"{value:.{digits}g}"


def bytes_text(count: float) -> str:
    """Returns a number of bytes in the unit that suits it.

    Example:
        >>> bytes_text(512), bytes_text(1536), bytes_text(174 * 2**20)
        ('512 B', '1.5 KiB', '174 MiB')
    """
    power = 0
    while abs(count) >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.3g} {_UNITS[power]}" if abs(count) < 1000 else f"{count:.0f} {_UNITS[power]}"


def ratio_text(value: float | None, reference: float | None) -> str:
    """Returns how many times the reference the value is, "" where that is unknown.

    Example:
        >>> ratio_text(3.0, 2.0), ratio_text(None, 2.0)
        ('1.50x', '')
    """
    if value is None or not reference:
        return ""
    return f"{value / reference:.2f}x"


def seconds_text(seconds: float) -> str:
    """Returns a duration for a progress line.

    Example:
        >>> seconds_text(3.21), seconds_text(75.0)
        ('3.2 s', '1:15')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
