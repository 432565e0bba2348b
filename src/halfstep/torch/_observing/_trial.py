"""What a step is run again for: a closer look at an operation, or other numbers in one."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from halfstep.torch._observing._ran import Key


class Trial:
    """Leaves every operation as it is, and looks at none."""

    def arguments(
        self, key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns what an operation is called with."""
        return args, kwargs

    def look(self, key: Key, outputs: Sequence[Tensor]) -> None:
        """Looks at what an operation made."""


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
