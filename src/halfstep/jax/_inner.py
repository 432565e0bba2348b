"""The calls in a step that take gradients: in a loop of training steps, one for each turn."""

from dataclasses import dataclass, field
from typing import Any

from halfstep.jax._finite import all_finite

# Of the turns of a loop, as of the steps of a script, those that a training starts with.
SAMPLED = (1, 10)


class Enough(Exception):
    """What was looked for is known."""


@dataclass(frozen=True)
class Turn:
    """A call, and which one of its function it was, counted from 1."""

    call: Any
    number: int


@dataclass
class Inner:
    """The calls of a step, as far as they are needed.

    Args:
        until_broken: Whether to go on until one gives something that is not finite, and not only
            through those that are sampled.
        turns: The first call of each function, and those that are sampled of the first one.
        broken: The call that gave something that is not finite.

    Example:
        >>> inner = Inner(until_broken=False)
        >>> inner.add("a call", key="loss", result=1.0)
        >>> [turn.number for turn in inner.turns]
        [1]
    """

    until_broken: bool
    turns: list[Turn] = field(default_factory=list)
    broken: Turn | None = None
    _counts: dict[Any, int] = field(default_factory=dict)

    def add(self, call: Any, key: Any, result: Any) -> None:
        """Takes a call.

        Args:
            call: It.
            key: What is the same for all calls of a function.
            result: What it returned.

        Raises:
            Enough: No further one is needed.
        """
        number = self._counts[key] = self._counts.get(key, 0) + 1
        if self.until_broken and not bool(all_finite(result)):
            self.broken = Turn(call, number)
            raise Enough
        first = next(iter(self._counts))
        if number == 1 or (number in SAMPLED and key == first):
            self.turns.append(Turn(call, number))
        if not self.until_broken and self._counts[first] >= SAMPLED[-1]:
            raise Enough
