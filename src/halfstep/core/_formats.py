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
                f"Format needs one of {', '.join(_BY_NAME)}, got {name!r}."
                f"{suggestion(name, _BY_NAME)}"
            )
        return found

    def __str__(self) -> str:
        return self.name


def _ieee(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """Returns a format whose topmost exponent is kept for infinities and NaN."""
    top = 2 ** (exponent_bits - 1) - 1
    return _layout(name, exponent_bits, mantissa_bits, (2.0 - 2.0**-mantissa_bits) * 2.0**top)


def _finite(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """Returns a format without infinities, in which only the topmost bit pattern is NaN."""
    top = 2 ** (exponent_bits - 1)
    return _layout(
        name, exponent_bits, mantissa_bits, (2.0 - 2.0 ** (1 - mantissa_bits)) * 2.0**top
    )


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

# Matrix products of 8-bit formats need a scale per tensor, which a policy does not hold.
COMPUTE_DTYPES: tuple[str, ...] = tuple(entry.name for entry in FORMATS if entry.bits >= 16)

_BY_NAME = {entry.name: entry for entry in FORMATS}

_SHORT = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "double": "float64",
    "fp64": "float64",
    "f64": "float64",
}


def dtype_suggestion(name: object) -> str:
    """Returns the dtype that was probably meant, as the end of an error.

    Example:
        >>> dtype_suggestion("bf16")
        " Did you mean 'bfloat16'?"
    """
    bare = str(name).rpartition(".")[2]
    return suggestion(_SHORT.get(bare, bare), COMPUTE_DTYPES)
