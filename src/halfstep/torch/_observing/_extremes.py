"""The smallest and the largest number of a tensor."""

import math
from typing import NamedTuple


class Extremes(NamedTuple):
    """What is known of the numbers of a tensor.

    Args:
        low: The smallest; NaN if there is any.
        high: The largest; NaN if there is any.
        nonzeros: How many are not zero, -1 where nobody counted.
    """

    low: float
    high: float
    nonzeros: int = -1

    @property
    def finite(self) -> bool:
        """Whether all numbers are.

        Example:
            >>> Extremes(-1.0, math.inf).finite
            False
        """
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def has_nan(self) -> bool:
        """Whether one is NaN."""
        return math.isnan(self.low)

    @property
    def only_minus_inf(self) -> bool:
        """Whether what is not finite is -inf.

        Example:
            >>> Extremes(-math.inf, 2.0).only_minus_inf
            True
        """
        return self.low == -math.inf and self.high < math.inf

    @property
    def largest(self) -> float | None:
        """The largest magnitude at an end that is finite, None if neither is."""
        return max((abs(each) for each in self[:2] if math.isfinite(each)), default=None)
