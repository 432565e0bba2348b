"""What a step is run again for: a closer look at an operation, or other numbers in one."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from halfstep.torch._observing._collecting import Collector, Histograms, Readings
from halfstep.torch._observing._ran import Key
from halfstep.torch._observing._roles import storage


class Trial:
    """Leaves every operation as it is, and looks at none."""

    def collector(self) -> Collector:
        """Returns what collects the numbers of the tensors."""
        return Readings()

    def arguments(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what an operation is called with."""
        return args, kwargs

    def look(self, key: Key, outputs: Sequence[Tensor]) -> None:
        """Looks at what an operation made."""


class Counted(Trial):
    """Counts the numbers of all tensors by exponent, in place of their extremes."""

    def collector(self) -> Collector:
        """Returns what collects the numbers of the tensors."""
        return Histograms()


class Kinds(Trial):
    """Looks whether operations made inf, NaN or both; waits for the device at these only.

    Args:
        keys: The operations.
    """

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = frozenset(keys)
        self.found: dict[Key, str] = {}

    def look(self, key: Key, outputs: Sequence[Tensor]) -> None:
        """Looks at what an operation made."""
        if key in self._keys:
            bad = [
                name
                for name in ("inf", "nan")
                if any(bool(getattr(each, f"is{name}")().any()) for each in outputs)
            ]
            self.found[key] = " and ".join(bad)


class Mended(Trial):
    """Changes what operations of one name in one module are called with.

    Their way back, for which autograd has saved what they were called with, sees the same.

    Args:
        key: One of them.
        change: Returns what takes the place of an argument.
        operand: Which argument is meant, None for all.
    """

    def __init__(self, key: Key, change: Callable[[Any], Any], operand: int | None = None) -> None:
        self._key = _of_forward(key)
        self._change, self._operand = change, operand
        # The tensors themselves, too: the memory of one that is gone may be another's.
        self._changed: dict[int, tuple[Tensor, Any]] = {}

    def arguments(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what an operation is called with."""
        if key.phase == "backward":
            return tuple(map(self._changed_before, args)), kwargs
        if _of_forward(key) != self._key:
            return args, kwargs
        return tuple(
            self._new(each) if self._operand in (None, place) else each
            for place, each in enumerate(args)
        ), kwargs

    def _new(self, value: Any) -> Any:
        new = self._change(value)
        if isinstance(value, Tensor):
            self._changed[storage(value)] = value, new
        return new

    def _changed_before(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        old, new = self._changed.get(storage(value), (None, None))
        return value if old is None or old.shape != value.shape else new


class Asked(Trial):
    """Hands the arguments of operations to a question, and remembers whether one said yes.

    Args:
        key: One of the operations, which are those of its name in its module on the way forward.
        asks: The question.
    """

    def __init__(self, key: Key, asks: Callable[[tuple[Any, ...]], bool]) -> None:
        self._key, self._asks = _of_forward(key), asks
        self.answer = False

    def arguments(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what an operation is called with."""
        if key.phase == "forward" and _of_forward(key) == self._key:
            self.answer = self.answer or self._asks(args)
        return args, kwargs


def _of_forward(key: Key) -> Key:
    return key._replace(call=0, nth=0, phase="forward")
