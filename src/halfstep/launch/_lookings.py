"""What looks at the numbers of a step in several frameworks, as one."""

from collections.abc import Callable, Iterable
from typing import Any

from halfstep.core import Diagnosis


class Lookings:
    """Asks one after the other, until one has seen something.

    Args:
        found: Those of the frameworks, None for one that does not look.

    Example:
        >>> Lookings([None]).ranges(1.0) is None
        True
    """

    def __init__(self, found: Iterable[Any]) -> None:
        self._found = [each for each in found if each is not None]

    def start(self) -> Callable[[], None]:
        """Begins to look, and returns what ends it."""
        ends = [each.start() for each in self._found]

        def end() -> None:
            while ends:
                ends.pop()()

        return end

    def forget(self) -> None:
        """The step is over."""
        for each in self._found:
            each.forget()

    def expect(self, *, sampled: bool) -> None:
        """Tells whether the next step is to be looked at."""
        for each in self._found:
            each.expect(sampled=sampled)

    @property
    def whole(self) -> bool:
        """Whether all of the step is looked at, and not only what is in models."""
        return all(each.whole for each in self._seeing)

    @property
    def notes(self) -> list[str]:
        """What there is to say of how the script ran."""
        return [text for each in self._found for text in each.notes]

    @property
    def has_calls(self) -> bool:
        """Whether something was called in the step that can be looked at."""
        return any(each.has_calls for each in self._found)

    @property
    def entered_broken(self) -> bool:
        """Whether what came back to a model was not finite already."""
        return any(each.entered_broken for each in self._found)

    @property
    def derived(self) -> bool:
        """Whether gradients came back that more gradients can be taken of."""
        return any(each.derived for each in self._found)

    @property
    def sizes(self) -> tuple[float, dict[str, float]] | None:
        """How large the data and the parameters are, of the first that knows."""
        return next(filter(None, (each.sizes for each in self._seeing)), None)

    @property
    def only(self) -> tuple[str, str] | None:
        """The name and the class of the only model of a step, None where nobody knows of one."""
        found = [each.only for each in self._seeing]
        return found[0] if len(found) == 1 else None

    @property
    def _seeing(self) -> list[Any]:
        return [each for each in self._found if each.has_calls]

    def faults(self, scale: float) -> Diagnosis:
        """Returns the first fault of the step, false if there is none.

        Args:
            scale: What the loss was multiplied by.
        """
        return next(filter(None, (each.faults(scale) for each in self._seeing)), Diagnosis())

    def ranges(self, scale: float) -> Any:
        """Returns how the numbers of the step lie in each format, None where nothing was seen.

        Args:
            scale: What the loss was multiplied by.
        """
        return next(filter(None, (each.ranges(scale) for each in self._seeing)), None)
