"""Counts values by exponent on their device, and reads the counts of many tensors at once."""

from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from halfstep.core import Exponents
from halfstep.torch._observing._counting import WIDTH, count, exponents_of, numbers_in

Key = TypeVar("Key", bound=Hashable)

_FIRST_ROWS = 64


class Tally(Generic[Key]):
    """Counts of the exponents of tensors, by a key, each on the device of its tensors.

    Nothing waits for a device before `read`, which waits once for each.

    Example:
        >>> tally = Tally()
        >>> tally.add("weight", torch.tensor([0.0, 1.0, -6.0]))
        >>> tally.add("weight", torch.tensor([1.5]).half())
        >>> tally.read()["weight"]
        Exponents(counts=((0, 2), (2, 1)), zeros=1, infs=0, nans=0, largest=6.0)
    """

    def __init__(self) -> None:
        self._places: dict[torch.device, dict[Key, int]] = {}
        self._rows: dict[torch.device, Tensor] = {}

    def add(self, key: Key, values: Any) -> None:
        """Counts the floating-point numbers that are stored in tensors, all else not.

        Args:
            key: What they are counted for.
            values: A tensor, or dicts and lists of them, to any depth.
        """
        for numbers in numbers_in(values):
            count(numbers, self._row(key, numbers.device))

    def read(self) -> dict[Key, Exponents]:
        """Returns what was counted so far, by key."""
        return _read((places, self._rows[device]) for device, places in self._places.items())

    def take(self) -> "Taken[Key]":
        """Hands over what was counted, without waiting, and begins anew."""
        taken = Taken(self._places, self._rows)
        self._places = {}
        self.clear()
        return taken

    def clear(self) -> None:
        """Forgets what was counted, and keeps the memory for it."""
        self._places.clear()
        for rows in self._rows.values():
            rows.zero_()

    def _row(self, key: Key, device: torch.device) -> Tensor:
        places = self._places.setdefault(device, {})
        place = places.setdefault(key, len(places))
        if device not in self._rows:
            size = (_FIRST_ROWS, WIDTH)
            self._rows[device] = torch.zeros(size, dtype=torch.int64, device=device)
        if place == len(self._rows[device]):
            self._rows[device] = _longer(self._rows[device])
        return self._rows[device][place]


class Taken(Generic[Key]):
    """Counts on their way to the host, in as little memory as they need there.

    Args:
        places: The rows of each device, by key.
        rows: The rows.
    """

    def __init__(
        self, places: dict[torch.device, dict[Key, int]], rows: dict[torch.device, Tensor]
    ) -> None:
        self._places = list(places.values())
        self._rows = [_on_the_way(rows[device][: len(each)]) for device, each in places.items()]
        self._arrived = [_mark(device) for device in places]

    def pack(self) -> None:
        """Stores what has arrived in less memory."""
        for index, event in enumerate(self._arrived):
            if event is None or event.query():
                self._arrived[index] = None
                self._rows[index] = self._rows[index].to_sparse()

    def read(self) -> dict[Key, Exponents]:
        """Returns the counts, and waits for them if need be."""
        for event in self._arrived:
            if event is not None:
                event.synchronize()
        return _read(zip(self._places, [each.to_dense() for each in self._rows], strict=True))


def _on_the_way(rows: Tensor) -> Tensor:
    """Returns a copy on the host, which is there once the device has come so far."""
    return rows.to("cpu", non_blocking=True, copy=True)


def _mark(device: torch.device) -> torch.Event | None:
    """Returns what tells when a device has done what it was given, None where it has."""
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def _read(parts: Iterable[tuple[dict[Key, int], Tensor]]) -> dict[Key, Exponents]:
    found: dict[Key, Exponents] = {}
    for places, rows in parts:
        counts = rows[: len(places)].tolist()
        for key, place in places.items():
            here = exponents_of(counts[place])
            found[key] = found[key] + here if key in found else here
    return found


def _longer(rows: Tensor) -> Tensor:
    """Returns twice as many rows, which begin with those that there are."""
    return torch.cat([rows, torch.zeros_like(rows)])
