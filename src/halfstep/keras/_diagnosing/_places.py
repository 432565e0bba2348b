"""Where a model is while it runs: which layer, called by which, for the how-many-eth time."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Place:
    """One call of a layer.

    Args:
        path: The names of the layers around it and its own.
        layer: It, or another operation of a functional model; the word for a function of Keras'
            backend that runs in a layer; None for a loss.
        call: How many calls of the same path there were before.
        parent: The call around it.
        inside: Whether its own call runs, and not the conversion of its inputs.
        atomic: Whether a function of Keras' backend runs, which is noted as a whole.
        told: Whether an operation in it made something that is not finite.
        count: How often each operation ran in it.
    """

    path: str
    layer: Any
    call: int = 0
    parent: "Place | None" = None
    inside: bool = False
    atomic: bool = False
    told: bool = False
    count: Counter[str] = field(default_factory=Counter)

    def tell(self) -> None:
        """Notes that something not finite was made here, and so in every call around it."""
        here: Place | None = self
        while here is not None:
            here.told, here = True, here.parent


class Places:
    """The calls that are running, in the thread that made this.

    Example:
        >>> places = Places()
        >>> with places.entered(None, "model"), places.entered(None, "dense") as place:
        ...     place.path
        'dense'
    """

    def __init__(self) -> None:
        self._stack: list[Place] = []
        self._calls: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._paused = 0

    @property
    def now(self) -> Place | None:
        """The innermost call; None outside of any, while looking away, and in other threads."""
        mine = self._thread == threading.get_ident() and not self._paused
        return self._stack[-1] if mine and self._stack else None

    @property
    def here(self) -> bool:
        """Whether this is the thread that is looked at, and it is."""
        return self._thread == threading.get_ident() and not self._paused

    @contextlib.contextmanager
    def entered(self, layer: Any, name: str) -> Iterator[Place]:
        """Is in a call until the block ends; the path leaves the name of the outermost out."""
        parent = self._stack[-1] if self._stack else None
        inner = parent is not None and parent.parent is not None
        path = f"{parent.path}/{name}" if parent and inner else name
        place = Place(path, layer, self._calls[path], parent)
        self._calls[path] += 1
        self._stack.append(place)
        try:
            yield place
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not look until the block ends."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
