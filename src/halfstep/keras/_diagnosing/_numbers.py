"""What there is to know of the numbers in a tensor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from halfstep.keras._diagnosing._backend import here
from halfstep.keras._private import backend


@dataclass(frozen=True, eq=False)
class Numbers:
    """The numbers of a floating-point tensor.

    Args:
        dtype: Their format.
        values: They themselves, at least in float32.
    """

    dtype: str
    values: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(self.values.shape)

    @property
    def finite(self) -> bool:
        """Whether all of them are."""
        return bool(np.isfinite(self.values).all())

    @property
    def constant(self) -> bool:
        """Whether it may be a number that somebody wrote."""
        return self.values.ndim == 0

    @property
    def only_minus_inf(self) -> bool:
        """Whether what is not finite is what masks are made of."""
        return bool((np.isfinite(self.values) | np.isneginf(self.values)).all())


def numbers(value: Any) -> Numbers | None:
    """Returns the numbers of a tensor, None where it has none that can be looked at.

    Example:
        >>> import keras
        >>> numbers(keras.ops.ones((2,), dtype="float16")).dtype, numbers("a text")
        ('float16', None)
    """
    if isinstance(value, (float, np.floating)):
        return Numbers("float32", np.asarray(value, "float64"))
    if isinstance(value, keras.Variable):
        value = value.value
    if not hasattr(value, "dtype") or isinstance(value, keras.KerasTensor):
        return None
    dtype = str(value.dtype).rpartition(".")[2] if isinstance(value, np.ndarray) else _dtype(value)
    if dtype is None or not backend.is_float_dtype(dtype):
        return None
    values = value if isinstance(value, np.ndarray) else here().on_host(value)
    return None if values is None else Numbers(dtype, values)


def _dtype(value: Any) -> str | None:
    try:
        return str(backend.standardize_dtype(value.dtype))
    except (TypeError, ValueError):  # such as a handle of a resource
        return None


def all_numbers(structure: Any) -> list[Numbers]:
    """Returns the numbers of every tensor and number in a structure."""
    found = map(numbers, keras.tree.flatten(structure))
    return [each for each in found if each is not None]


def bad(values: Iterable[Numbers]) -> Numbers | None:
    """Returns the first that are not all finite."""
    return next((each for each in values if not each.finite), None)


def kind(values: Numbers) -> str:
    """Returns in words what is not finite.

    Example:
        >>> kind(Numbers("float32", np.array([np.inf, 1.0, np.nan])))
        'inf and nan'
    """
    words = {"inf": np.isinf(values.values), "nan": np.isnan(values.values)}
    return " and ".join(word for word, where in words.items() if where.any())


def largest(values: Sequence[Numbers]) -> float | None:
    """Returns the largest finite magnitude, None where there is none.

    Example:
        >>> largest([Numbers("float32", np.array([np.inf, -3.0]))])
        3.0
    """
    finite = (np.abs(each.values[np.isfinite(each.values)]) for each in values)
    return max((float(each.max()) for each in finite if each.size), default=None)
