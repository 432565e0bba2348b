"""The scales at which values fit a format: powers of two between two ends."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce


@dataclass(frozen=True)
class Window:
    """The powers k for which values times 2**k lose neither end; false if there is none.

    Args:
        lowest: Below it, too many small values become zero.
        highest: Above it, the largest value overflows.

    Example:
        >>> window = Window(3, 12)
        >>> 8 in window, window.middle, bool(window & Window(13, 20))
        (True, 8, False)
    """

    lowest: int
    highest: int

    @property
    def middle(self) -> int:
        """The power that is as far from one end as from the other, the higher one of two.

        Example:
            >>> Window(-4, 1).middle
            -1
        """
        return (self.lowest + self.highest + 1) // 2

    @staticmethod
    def common(windows: "Iterable[Window | None]") -> "Window | None":
        """Returns what is in all of the windows, None where there are none.

        Example:
            >>> Window.common([Window(0, 9), None, Window(4, 20)])
            Window(lowest=4, highest=9)
        """
        found = [each for each in windows if each is not None]
        return reduce(Window.__and__, found) if found else None

    def to_dict(self) -> dict[str, int]:
        """Returns both ends as plain data.

        Example:
            >>> Window(3, 12).to_dict()
            {'lowest': 3, 'highest': 12}
        """
        return {"lowest": self.lowest, "highest": self.highest}

    def __and__(self, other: "Window") -> "Window":
        return Window(max(self.lowest, other.lowest), min(self.highest, other.highest))

    def __contains__(self, power: float) -> bool:
        return self.lowest <= power <= self.highest

    def __bool__(self) -> bool:
        return self.lowest <= self.highest

    def __str__(self) -> str:
        return f"2^{self.lowest} to 2^{self.highest}" if self else "none"


def most_common(windows: list[Window]) -> Window:
    """Returns where the most of some windows, none of them empty, overlap first.

    Example:
        >>> most_common([Window(0, 9), Window(4, 20), Window(30, 40)])
        Window(lowest=4, highest=9)
    """
    ends = sorted({end for each in windows for end in (each.lowest, each.highest)})
    best = max(ends, key=lambda power: sum(power in each for each in windows))
    around = Window.common(each for each in windows if best in each)
    assert around is not None
    return around
