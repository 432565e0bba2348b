"""What is known of a value while a program is gone through."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import lax

from halfstep.core import FORMATS

FLOAT32 = np.dtype("float32")
FLOAT16 = np.dtype("float16")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# The dtypes that rules speak of; float64 and numbers of 8 bits are chosen on purpose.
ELIGIBLE = (FLOAT16, BFLOAT16, FLOAT32)
_LIMITS = {each.name: each for each in FORMATS}


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Args:
        kind: "parameter" for an argument, "bias" for one that was spread over more dimensions,
            "product" for what a matrix product or convolution gave, "constant" for a number that
            the program holds; empty for anything else.
        number: Which number a constant is.
    """

    kind: str = ""
    number: float = 0.0


UNKNOWN = Origin()
PARAMETER = Origin("parameter")
BIAS = Origin("bias")
PRODUCT = Origin("product")


def constant(number: float) -> Origin:
    """Returns the origin of a number that the program holds."""
    return Origin("constant", float(number))


@dataclass(frozen=True)
class Value:
    """An array, and where it comes from.

    Args:
        array: The array, in the dtype that it has by now.
        origin: Where it comes from.
    """

    array: Any
    origin: Origin = UNKNOWN

    @property
    def dtype(self) -> Any:
        """The dtype that it has by now."""
        return jax.typeof(self.array).dtype

    def in_(self, dtype: Any) -> Any:
        """Returns the array in another dtype."""
        return self.array if self.dtype == dtype else _cast(self.array, dtype)

    def within(self, dtype: Any) -> Any:
        """Returns the array in another dtype, a constant not beyond what is finite there."""
        largest = limit(dtype).max
        if not (largest < abs(self.origin.number) < math.inf):
            return self.in_(dtype)
        low, high = (np.asarray(each, self.dtype) for each in (-largest, largest))
        return _cast(lax.clamp(low, self.array, high), dtype)


def parameters(arrays: Sequence[Any]) -> list[Value]:
    """Returns the arguments of a function as values."""
    return [Value(each, PARAMETER) for each in arrays]


def _cast(array: Any, dtype: Any) -> Any:
    # What a program holds stays a literal, which needs no operation.
    if isinstance(array, (np.ndarray, np.generic, float, int)):
        with np.errstate(over="ignore"):
            return np.asarray(array).astype(dtype)
    return lax.convert_element_type(array, dtype)


def limit(dtype: Any) -> Any:
    """Returns the limits of a format."""
    return _LIMITS[np.dtype(dtype).name]


def fits(number: float, dtype: Any) -> bool:
    """Returns whether a format holds a number with all of its precision.

    Example:
        >>> fits(0.1, FLOAT16), fits(1e9, FLOAT16), fits(1e-8, FLOAT16), fits(1e-8, BFLOAT16)
        (True, False, False, True)
    """
    if number == 0.0 or not math.isfinite(number):
        return True
    return bool(limit(dtype).min_normal <= abs(number) <= limit(dtype).max)


def widest(dtypes: Sequence[Any]) -> Any:
    """Returns the narrowest dtype that holds all of them, None for none.

    Example:
        >>> widest([BFLOAT16, FLOAT16]).name
        'float32'
    """
    different = set(dtypes)
    if len(different) > 1:
        return FLOAT32
    return different.pop() if different else None


def is_low(dtype: Any) -> bool:
    """Returns whether a dtype is one of the low formats.

    Example:
        >>> is_low(BFLOAT16), is_low(FLOAT32)
        (True, False)
    """
    return dtype in (FLOAT16, BFLOAT16)
