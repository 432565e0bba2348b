"""Counts values by exponent on their device, without waiting for it.

A count of the exponents is a row of integers. Its first 256 places are those of the eight bits in
which float32 keeps the exponent, then come NaN, zero, and the subnormal numbers, by the bits that
their digits have as a number of their own. The last place is the largest magnitude, as bits, which
are ordered as the numbers are.
"""

import struct
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from halfstep.core import Exponents
from halfstep.torch._private import unwrapped
from halfstep.torch._storages import plain_tensors

Key = TypeVar("Key", bound=Hashable)

_MAGNITUDE, _INF, _DIGITS = 0x7FFFFFFF, 0x7F800000, 23
_FIELDS = 256
_NAN, _ZERO = _FIELDS, _FIELDS + 1
_LARGEST = _ZERO + 127 + _DIGITS
_WIDTH = _LARGEST + 1
# As many numbers as the fastest memory of a processor holds.
_CHUNK = 2**17
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
        for numbers in _numbers(values):
            _COUNT.get(numbers.device.type, _count)(numbers, self._row(key, numbers.device))

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
            size = (_FIRST_ROWS, _WIDTH)
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
            found[key] = found.get(key, Exponents()) + _exponents(counts[place])
    return found


def _longer(rows: Tensor) -> Tensor:
    """Returns twice as many rows, which begin with those that there are."""
    return torch.cat([rows, torch.zeros_like(rows)])


def _numbers(values: Any) -> Iterator[Tensor]:
    """Yields the numbers in tensors as flat float32, which holds those of all shorter formats."""
    for tensor in plain_tensors(values):
        plain = unwrapped(tensor.detach())
        if plain.layout in _COMPRESSED:
            plain = plain.values()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        if plain.is_floating_point() and plain.numel() and not plain.is_meta:
            yield plain.as_subclass(Tensor).float().reshape(-1)


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _count(numbers: Tensor, row: Tensor) -> None:
    """Adds numbers to a row in a fixed number of kernels, none of which tells the host anything."""
    bits = numbers.view(torch.int32) & _MAGNITUDE
    places = _places(bits).long()
    row.scatter_add_(0, places, row.new_ones(1).expand_as(places))
    _note_largest(bits, row)


def _places(bits: Tensor) -> Tensor:
    """Returns the place in a row that each number belongs to."""
    normal = (bits >> _DIGITS) + (bits > _INF)
    # The digits of a subnormal number as a number: no float is ever computed with, since a
    # processor may be set to take subnormal ones for zero.
    small = (bits.float().view(torch.int32) >> _DIGITS) + _ZERO
    return torch.where(bits < 1 << _DIGITS, small, normal)


def _note_largest(bits: Tensor, row: Tensor) -> None:
    largest = torch.where(bits < _INF, bits, 0).amax()
    row[_LARGEST] = torch.maximum(row[_LARGEST], largest)


def _count_here(numbers: Tensor, row: Tensor) -> None:
    """Adds numbers to a row in the way that is fast where looking at a result costs nothing."""
    counts = row.numpy()
    for chunk in numbers.split(_CHUNK):
        bits = chunk.view(torch.int32) & _MAGNITUDE
        # Eight bits are all there are, and counting bytes is twice as fast.
        fields = torch.bincount((bits >> _DIGITS).to(torch.uint8), minlength=_FIELDS).numpy()
        zeros = len(bits) - int(bits.count_nonzero()) if fields[0] else 0
        if fields[-1] or fields[0] > zeros:
            _count(chunk, row)
            continue
        fields[0] = 0
        counts[:_FIELDS] += fields
        counts[_ZERO] += zeros
        counts[_LARGEST] = max(counts[_LARGEST], int(bits.amax()))


_COUNT: dict[str, Callable[[Tensor, Tensor], None]] = {"cpu": _count_here}


def _exponents(row: list[int]) -> Exponents:
    """Returns what a row says."""
    lowest = -126 - _DIGITS
    small, normal = row[_LARGEST - _DIGITS : _LARGEST], row[1 : _FIELDS - 1]
    return Exponents(
        tuple(enumerate([*small, *normal], start=lowest)),
        zeros=row[_ZERO],
        infs=row[_FIELDS - 1],
        nans=row[_NAN],
        largest=struct.unpack("f", struct.pack("I", row[_LARGEST]))[0],
    )
