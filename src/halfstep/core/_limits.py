"""Where a format ends, in powers of two."""

import functools
import math

from halfstep.core._formats import Format


def named(form: Format | str) -> Format:
    """Returns a format as it is, or the one of that name."""
    return form if isinstance(form, Format) else Format.named(form)


def exponent(value: float) -> int:
    """Returns e for which 2**e <= value < 2**(e + 1).

    Example:
        >>> exponent(6.0), exponent(2.0**-24)
        (2, -24)
    """
    return math.frexp(value)[1] - 1


def flush_exponent(form: Format) -> int:
    """Returns the exponent below which everything becomes zero.

    What is half of the smallest number becomes zero as well, what is above it does not.

    Example:
        >>> flush_exponent(Format.named("float16"))
        -25
    """
    return exponent(form.smallest_subnormal) - 1


@functools.cache
def overflow_limit(form: Format) -> float:
    """Returns the smallest number that is too large: less is rounded to the largest one that fits.

    Example:
        >>> overflow_limit(Format.named("float16"))
        65520.0
    """
    step = math.ldexp(1.0, exponent(form.max) - form.mantissa_bits)
    between = form.max + step / 2
    if math.isinf(between):
        return form.max
    # Halfway, the even neighbour is chosen: the largest number is one in float8_e4m3fn only.
    return between if (form.max / step) % 2 else math.nextafter(between, math.inf)


def highest_power(form: Format, largest: float) -> int:
    """Returns the largest k for which `largest * 2**k` does not overflow.

    Example:
        >>> highest_power(Format.named("float16"), 65504.0)
        0
    """
    limit, end = math.frexp(overflow_limit(form))
    fraction, start = math.frexp(largest)
    return end - start - (fraction >= limit)
