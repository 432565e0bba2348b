"""How many values lie between which powers of two, and what that says about number formats."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.core import _fields
from halfstep.core._formats import FORMATS, Format
from halfstep.core._limits import exponent, flush_exponent, highest_power, named
from halfstep.core._window import Window
from halfstep.errors import UsageError

LOWEST, HIGHEST = -149, 127
TOLERANCE = 0.001
# What a training step can be kept in instead of float32.
LOW_FORMATS = tuple(each.name for each in FORMATS if each.bits <= 16)

# A scale and its reciprocal are float32 values.
_SCALES = Window(-126, 126)
_COUNTS = ("zeros", "infs", "nans")


@dataclass(frozen=True)
class Exponents:
    """How many values lie between which powers of two: all that formats and scales depend on.

    A value counts at the exponent e for which 2**e <= abs(value) < 2**(e + 1), as float32 holds
    it. Fractions are of the values that are finite and not zero. Two of them add up.

    Args:
        counts: Pairs of an exponent, from -149 to 127, and how many values have it; or a dict.
        zeros: How many are zero.
        infs: How many are infinite.
        nans: How many are not a number.
        largest: The largest finite magnitude.

    Raises:
        UsageError: There is no such exponent in float32, or a count below zero.

    Example:
        >>> gradient = Exponents({-27: 3, -20: 1}, zeros=4, largest=1e-6)
        >>> gradient.total, gradient.flushed("float16"), gradient.flushed("float16", power=2)
        (8, 0.75, 0.0)
        >>> print(gradient.window("float16"))
        2^2 to 2^35
    """

    counts: tuple[tuple[int, int], ...] = ()
    zeros: int = 0
    infs: int = 0
    nans: int = 0
    largest: float = 0.0

    def __post_init__(self) -> None:
        pairs = self.counts.items() if isinstance(self.counts, Mapping) else self.counts
        counts = tuple(sorted((int(place), int(count)) for place, count in pairs if count))
        object.__setattr__(self, "counts", counts)
        _check(self)

    @classmethod
    def of(cls, values: Any) -> "Exponents":
        """Returns the exponents of an array, or of anything that NumPy makes one of.

        Example:
            >>> Exponents.of([0.0, 1.0, 1.5, -8.0])
            Exponents(counts=((0, 2), (3, 1)), zeros=1, infs=0, nans=0, largest=8.0)
        """
        import numpy as np  # the core is imported without it

        array = np.abs(np.asarray(values, dtype=np.float32)).ravel()
        finite = array[np.isfinite(array)].astype(np.float64)
        numbers = finite[finite > 0]
        places, counts = np.unique(np.frexp(numbers)[1] - 1, return_counts=True)
        return cls(
            tuple(zip(places.tolist(), counts.tolist(), strict=True)),
            zeros=finite.size - numbers.size,
            infs=int(np.isinf(array).sum()),
            nans=int(np.isnan(array).sum()),
            largest=float(numbers.max(initial=0.0)),
        )

    @property
    def numbers(self) -> int:
        """How many values are finite and not zero.

        Example:
            >>> Exponents.of([0.0, 1.0, 3.0]).numbers
            2
        """
        return sum(count for _, count in self.counts)

    @property
    def total(self) -> int:
        """How many values there are.

        Example:
            >>> Exponents.of([0.0, 1.0, 3.0]).total
            3
        """
        return self.numbers + self.zeros + self.infs + self.nans

    @property
    def lowest(self) -> int | None:
        """The smallest exponent, None where every value is zero, infinite or not a number.

        Example:
            >>> Exponents.of([0.0, 1.0, 3.0]).lowest
            0
        """
        return self.counts[0][0] if self.counts else None

    @property
    def highest(self) -> int | None:
        """The largest exponent, None where there is none.

        Example:
            >>> Exponents.of([0.0, 1.0, 3.0]).highest
            1
        """
        return self.counts[-1][0] if self.counts else None

    @property
    def zero(self) -> float:
        """The fraction of all values that are zero.

        Example:
            >>> Exponents.of([0.0, 0.0, 1.0, 3.0]).zero
            0.5
        """
        return self.zeros / max(self.total, 1)

    def flushed(self, form: Format | str, power: int = 0) -> float:
        """Returns the fraction that becomes zero in a format, times 2**power.

        It is exact but for values of half the smallest number of the format: they become zero,
        too, and the other values between the same powers of two do not.

        Args:
            form: The format, or its name.
            power: The exponent of the scale.

        Example:
            >>> Exponents({-26: 1, -25: 1}, largest=4e-8).flushed("float16")
            0.5
        """
        end = flush_exponent(named(form)) - power
        return self._fraction(lambda place: place < end)

    def subnormal(self, form: Format | str, power: int = 0) -> float:
        """Returns the fraction that a format holds, times 2**power, with fewer digits than others.

        Args:
            form: The format, or its name.
            power: The exponent of the scale.

        Example:
            >>> Exponents({-15: 1, -14: 1}, largest=1e-4).subnormal("float16")
            0.5
        """
        start, end = flush_exponent(named(form)) - power, exponent(named(form).min_normal) - power
        return self._fraction(lambda place: start <= place < end)

    def overflowed(self, form: Format | str, power: int = 0) -> float:
        """Returns the fraction that is too large for a format, times 2**power.

        A format ends between two powers of two. Of the values between those, only the largest is
        known, so it counts and the others do not: nothing overflows exactly where this is 0.

        Args:
            form: The format, or its name.
            power: The exponent of the scale.

        Example:
            >>> Exponents({15: 1}, largest=65504.0).overflowed("float16")
            0.0
            >>> Exponents({15: 1}, largest=65504.0).overflowed("float16", power=1)
            1.0
        """
        top = exponent(named(form).max) - power
        beyond = self._fraction(lambda place: place > top)
        fits = not self.counts or power <= highest_power(named(form), self.largest)
        return 0.0 if fits else max(beyond, 1 / self.numbers)

    def saturated(self, form: Format | str, power: int = 0) -> float:
        """Returns the fraction above half of what a format can hold at most, times 2**power.

        More exactly, above the largest power of two that it can hold.

        Args:
            form: The format, or its name.
            power: The exponent of the scale.

        Example:
            >>> Exponents({14: 3, 15: 1}, largest=4e4).saturated("float16")
            0.25
        """
        top = exponent(named(form).max) - power
        return self._fraction(lambda place: place >= top)

    def window(self, form: Format | str, tolerance: float = TOLERANCE) -> Window | None:
        """Returns the scales, as powers of two, at which a format loses neither end.

        A tensor with a scale of its own fits the format if there is one.

        Args:
            form: The format, or its name.
            tolerance: The fraction that may become zero; nothing may overflow.

        Returns:
            The window, which may be empty; None where there is nothing to lose.

        Example:
            >>> print(Exponents({-31: 1, 10: 1}, largest=1024.0).window("float16"))
            none
        """
        first = self._first_kept(tolerance)
        if first is None:
            return None
        found = named(form)
        return Window(flush_exponent(found) - first, highest_power(found, self.largest)) & _SCALES

    def _first_kept(self, tolerance: float) -> int | None:
        """Returns the largest exponent below which there is no more than may be lost."""
        below = 0
        for place, count in self.counts:
            below += count
            if below > tolerance * self.numbers:
                return place
        return self.highest

    def _fraction(self, holds: Callable[[int], bool]) -> float:
        return sum(count for place, count in self.counts if holds(place)) / max(self.numbers, 1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the counts as plain data.

        Example:
            >>> Exponents({-3: 2}, largest=0.2).to_dict()["counts"]
            [[-3, 2]]
        """
        return {**_fields.to_dict(self), "counts": [list(pair) for pair in self.counts]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Exponents":
        """Returns the exponents of a dict that `to_dict` made.

        Example:
            >>> Exponents.from_dict({"counts": [[-3, 2]], "largest": 0.2}).numbers
            2
        """
        return cls(**_fields.checked(cls, data, UsageError))

    def __add__(self, other: "Exponents") -> "Exponents":
        if not isinstance(other, Exponents):
            return NotImplemented
        counts = dict(self.counts)
        for place, count in other.counts:
            counts[place] = counts.get(place, 0) + count
        rest = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return Exponents(tuple(counts.items()), **rest, largest=max(self.largest, other.largest))


def _check(value: Exponents) -> None:
    places, counts = zip(*value.counts, strict=True) if value.counts else ((), ())
    for place in places:
        if not LOWEST <= place <= HIGHEST:
            raise UsageError(
                f"Exponents needs exponents from {LOWEST} to {HIGHEST}, got {place}. Write those of"
                " float32 values."
            )
    for count in (*counts, *(getattr(value, name) for name in _COUNTS)):
        if count < 0:
            raise UsageError(f"Exponents needs counts >= 0, got {count}. Count values once.")
    if not _is_largest(value):
        raise UsageError(
            f"Exponents needs largest= the largest finite magnitude, 0.0 without any, got "
            f"{value.largest!r} where the largest exponent is {value.highest}. Pass that of the "
            "values that were counted."
        )


def _is_largest(value: Exponents) -> bool:
    if value.highest is None:
        return value.largest == 0.0
    return 0.0 < value.largest < float("inf") and exponent(value.largest) == value.highest
