"""Which regions and autocasts a step is in, whoever entered them."""

import contextlib
import os
from collections.abc import Iterator
from types import CodeType
from typing import Any

from halfstep.torch._observing._places import Places, line
from halfstep.torch._observing._sources import entering
from halfstep.torch._observing._ways import Asked, Way
from halfstep.torch._private import in_backward


class Force:
    """Follows what is entered and left, the innermost last.

    Args:
        places: Where the model is.
        within: The functions that run the step.
    """

    def __init__(self, places: Places, within: tuple[CodeType, ...]) -> None:
        self._places, self._within = places, within
        # With how many modules were called when each was entered.
        self._stack: list[tuple[Way | None, int]] = []
        # The region whose own autocast is the next to be entered.
        self._due: Way | None = None
        self._of_regions: dict[Asked, Way] = {}

    @property
    def here(self) -> Way | None:
        """The innermost way that casts anything, None outside of all."""
        return self._innermost[0]

    @property
    def where(self) -> str | None:
        """The path by which rules there know the module that runs, None for one out of reach.

        In a region paths begin there, in an autocast at the first module that is called in it.
        """
        way, depth = self._innermost
        if way is None:
            return None
        around = [each for each, _ in self._stack if each and each.region]
        # Where paths are followed already, they are not begun anew.
        root = next((each for each in around if each.region and each.region._located), way)
        if root.region is not None:
            return root.below(self._places.here.below)
        return self._places.below_call(depth)

    @property
    def _innermost(self) -> tuple[Way | None, int]:
        return next((each for each in reversed(self._stack) if each[0] is not None), (None, 0))

    def source(self) -> str:
        """Returns the line of the autocast that is entered, or that runs, as "file:line"."""
        return entering() or os.path.basename(line(self._within).partition(" (")[0])

    def enter(self, asked: Asked | None) -> Way | None:
        """Takes note of an autocast, None for an island where nothing is cast; returns its way."""
        way, self._due = self._due, None
        if way is not None and asked is not None:
            self._of_regions[asked._replace(source="")] = way
        if way is None and asked is not None:
            way = self._again(asked) or Way(asked=asked)
        self._stack.append((way, self._places.depth))
        return way

    def _again(self, asked: Asked) -> Way | None:
        """Returns the region of which a checkpoint computes a part again."""
        return self._of_regions.get(asked._replace(source="")) if in_backward() else None

    def leave(self) -> Way | None:
        """Takes note that the innermost one was left, and returns its way."""
        return self._stack.pop()[0] if self._stack else None

    @contextlib.contextmanager
    def running(self, forward: Any) -> Iterator[Way]:
        """Takes note of a region until the block ends."""
        root, path = self._places.known(forward._owner())
        way = self._due = Way(forward.region, root, path)
        self._stack.append((way, self._places.depth))
        try:
            yield way
        finally:
            self._stack.pop()
            self._due = None
