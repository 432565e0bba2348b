"""Parts of a whole, as a reader wants them."""

_TINY = 1e-4


def share_text(share: float) -> str:
    """Returns a fraction in percent, with no more digits than one looks at.

    Example:
        >>> share_text(0.0), share_text(0.12345), share_text(1e-6), share_text(1.0)
        ('0 %', '12.3 %', '< 0.01 %', '100 %')
    """
    if 0 < share < _TINY:
        return f"< {100 * _TINY:g} %"
    return f"{100 * share:.3g} %"
