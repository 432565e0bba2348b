"""Chooses a format for each call of a step: the cheapest, casts at the boundaries included."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.core import Boundary, cheapest
from halfstep.torch._planning._casts import Casting
from halfstep.torch._planning._costs import Cost
from halfstep.torch._planning._recording import Call, Kind

_FREE = (Cost(0.0), Cost(0.0))


@dataclass(frozen=True)
class Costed:
    """The calls of a step, and what each kind of them costs.

    Args:
        calls: The calls.
        kinds: Their kinds.
        costs: What each kind costs in float32 and in the low format, None where it has no choice.
        cast: Tells how long casting a tensor takes, forward and backward.
        budget: The error that a call may have.
    """

    calls: Sequence[Call]
    kinds: Sequence[Kind]
    costs: Sequence[tuple[Cost, Cost] | None]
    cast: Casting
    budget: float

    def lowered(self, per_byte: float = 0.0) -> list[bool]:
        """Returns for each call whether it runs in the low format, so that the step is cheapest.

        Args:
            per_byte: The seconds that it is worth not to keep a byte for backward.
        """
        prices = [self._price(each, per_byte) for each in self.calls]
        return cheapest(prices, self._boundaries())

    def total(self, lowered: Sequence[bool], per_byte: float = 0.0) -> float:
        """Returns what the step costs if calls run like that, as far as it was measured."""
        calls = zip(self.calls, lowered, strict=True)
        own = sum(self._price(each, per_byte)[low] for each, low in calls)
        apart = (each for each in self._boundaries() if lowered[each.first] != lowered[each.second])
        return own + sum(each.cost for each in apart)

    def _price(self, call: Call, per_byte: float) -> tuple[float, float]:
        """Returns what a call costs in float32, and in the low format."""
        kind = self.kinds[call.kind]
        wide, low = self.costs[call.kind] or _FREE
        in_wide, in_low = (each.seconds + per_byte * each.saved_bytes for each in (wide, low))
        # What one step shows of sums and exponentials is no promise for the next one.
        if kind.action == "full" or low.error > self.budget:
            return in_wide, math.inf
        return in_wide, in_low + sum(self._weights(kind, call))

    def _weights(self, kind: Kind, call: Call) -> Iterator[float]:
        """Yields what casting tensors takes that are in float32 in any case."""
        if kind.action == "lower":
            yield from (self.cast.seconds(each) for each in call.sources if each.maker is None)

    def _boundaries(self) -> Iterator[Boundary]:
        for number, call in enumerate(self.calls):
            for each in call.sources:
                if each.maker is not None:
                    yield Boundary(each.maker, number, self.cast.seconds(each))
