"""The number formats that training in mixed precision meets, and their limits."""

from dataclasses import dataclass

from halfstep.core._text import suggestion
from halfstep.errors import FormatError


@dataclass(frozen=True)
class Format:
    """The limits of a floating-point format.

    Args:
        name: The name that every framework uses.
        bits: The size of a value.
        exponent_bits: How many of the bits hold the exponent.
        mantissa_bits: How many of the bits hold the fraction; the leading 1 is not among them.
        max: The largest finite value.
        min_normal: The smallest positive value of full precision.
        smallest_subnormal: The smallest positive value.
        epsilon: The distance from 1 to the next larger value.

    Example:
        >>> Format.named("float16").max
        65504.0
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    max: float
    min_normal: float
    smallest_subnormal: float
    epsilon: float

    @staticmethod
    def named(name: str) -> "Format":
        """Returns the format of that name.

        Example:
            >>> Format.named("bfloat16").epsilon
            0.0078125
        """
        found = _BY_NAME.get(name) if isinstance(name, str) else None
        if found is None:
            raise FormatError(
                f"Format needs one of {', '.join(_BY_NAME)}, got {name!r}.{suggestion(name, _BY_NAME)}"
            )
        return found


def _ieee(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """Returns a format whose topmost exponent is kept for infinities and NaN."""
    top = 2 ** (exponent_bits - 1) - 1
    largest = (2.0 - 2.0**-mantissa_bits) * 2.0**top
    return _layout(name, exponent_bits, mantissa_bits, largest)


def _finite(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """Returns a format without infinities, in which only the topmost bit pattern is NaN."""
    top = 2 ** (exponent_bits - 1)
    largest = (2.0 - 2.0 * 2.0**-mantissa_bits) * 2.0**top
    return _layout(name, exponent_bits, mantissa_bits, largest)


def _layout(name: str, exponent_bits: int, mantissa_bits: int, largest: float) -> Format:
    bottom = 2 - 2 ** (exponent_bits - 1)
    return Format(
        name=name,
        bits=1 + exponent_bits + mantissa_bits,
        exponent_bits=exponent_bits,
        mantissa_bits=mantissa_bits,
        max=largest,
        min_normal=2.0**bottom,
        smallest_subnormal=2.0 ** (bottom - mantissa_bits),
        epsilon=2.0**-mantissa_bits,
    )


FORMATS: tuple[Format, ...] = (
    _ieee("float64", 11, 52),
    _ieee("float32", 8, 23),
    _ieee("bfloat16", 8, 7),
    _ieee("float16", 5, 10),
    _finite("float8_e4m3fn", 4, 3),
    _ieee("float8_e5m2", 5, 2),
)

_BY_NAME = {entry.name: entry for entry in FORMATS}
