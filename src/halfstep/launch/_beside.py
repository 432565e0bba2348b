"""A probe and that of another framework, which the script trains with as well or instead."""

from typing import Any

from halfstep.launch._lookings import Lookings


class Beside:
    """What measures is the first one; both look at steps.

    Args:
        main: The probe that measures.
        other: The other one, such as that of JAX where PyTorch only loads the data.

    Example:
        >>> from types import SimpleNamespace
        >>> from halfstep.launch._probe import NoProbe
        >>> other = SimpleNamespace(versions=lambda: {"jax": "0.10.2"}, has_lowered=lambda: None)
        >>> both = Beside(NoProbe(), other)
        >>> both.versions(), both.floats([1])
        ({'jax': '0.10.2'}, [1.0])
    """

    def __init__(self, main: Any, other: Any) -> None:
        self._main, self._other = main, other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._main, name)

    def look_closely(self) -> Lookings:
        """Returns what looks with both."""
        return Lookings([self._main.look_closely(), self._other.look_closely()])

    def has_lowered(self) -> bool | None:
        """Returns whether either was to compute in low precision, None if one does not know."""
        found = (self._main.has_lowered(), self._other.has_lowered())
        return True if True in found else None if None in found else False

    def peak_memory(self) -> tuple[int, str] | None:
        """Returns the most bytes in use on the device, from whichever tells."""
        found: tuple[int, str] | None = self._main.peak_memory() or self._other.peak_memory()
        return found

    def device(self) -> str:
        """Returns the name of the accelerator in use, "" where there is none."""
        return str(self._main.device() or self._other.device())

    def versions(self) -> dict[str, str]:
        """Returns the names and versions of both; others import JAX, too, without a use for it."""
        used = self._other.has_lowered() is not False
        return {**self._main.versions(), **(self._other.versions() if used else {})}
