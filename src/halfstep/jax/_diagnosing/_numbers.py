"""What there is to know of the numbers in an array."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

_ROUNDING = 1e-2
# Half of where float16 ends, rounded down.
_FAR = 3e4


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of an array on the host.

    Args:
        values: They themselves.
    """

    values: Any

    @property
    def dtype(self) -> str:
        """Their format; that of the parts of complex ones."""
        return str(jnp.finfo(self.values.dtype).dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.values.shape)

    @property
    def kind(self) -> str:
        """What is not finite, in words.

        Example:
            >>> Numbers(np.array([np.inf, 1.0, np.nan])).kind
            'inf and nan'
        """
        words = {"inf": np.isinf(self.values), "nan": np.isnan(self.values)}
        return " and ".join(word for word, where in words.items() if where.any())

    @property
    def finite(self) -> bool:
        """Whether all of them are."""
        return bool(np.isfinite(self.values).all())

    @property
    def is_real(self) -> bool:
        """Whether they are no complex numbers."""
        return not np.iscomplexobj(self.values)

    @property
    def only_minus_inf(self) -> bool:
        """Whether what is not finite is what masks are made of."""
        return bool((np.isfinite(self.values) | np.isneginf(self.values)).all())


def numbers(value: Any) -> Numbers | None:
    """Returns the numbers of an array, None where there are none that could be inf or NaN.

    Example:
        >>> numbers(np.ones(2, "float16")).dtype, numbers(np.ones(2, "int32"))
        ('float16', None)
    """
    if not isinstance(value, jax.Array | np.ndarray | np.generic) or not is_inexact(value.dtype):
        return None
    return Numbers(np.asarray(value))


def any_numbers(value: Any) -> Numbers | None:
    """Returns the numbers of an array, also where it holds integers."""
    if is_number(value) and not is_inexact(value.dtype):
        return Numbers(np.asarray(value, np.float64))
    return numbers(value)


def is_number(value: Any) -> bool:
    """Returns whether a value is an array of real numbers or integers.

    Example:
        >>> is_number(np.ones(2, "int32")), is_number(np.ones(2, "bool"))
        (True, False)
    """
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    kinds = (jnp.floating, jnp.integer)
    return is_array and any(jnp.issubdtype(value.dtype, kind) for kind in kinds)


def is_inexact(dtype: Any) -> bool:
    """Returns whether a dtype is one of real or complex numbers."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def largest(values: Iterable[Numbers]) -> float:
    """Returns the largest finite magnitude, 0 where there is none.

    Example:
        >>> largest([Numbers(np.array([np.inf, -3.0]))])
        3.0
    """
    arrays = [each.values for each in values]
    finite = [np.abs(each[np.isfinite(each)]) for each in arrays]
    return max((float(each.max()) for each in finite if each.size), default=0.0)


def are_alike(ours: Any, theirs: Any) -> bool:
    """Returns whether results are the same, but for numbers that no format of 16 bits holds."""
    if ours.shape != theirs.shape:
        return False
    one, other = (np.asarray(each, np.float64) for each in (ours, theirs))
    near = np.isclose(one, other, rtol=_ROUNDING, atol=_ROUNDING)
    return bool((near | (np.minimum(one, other) < -_FAR)).all())
