"""Counts the numbers of a tensor by exponent, in a row of integers.

The first 256 places of a row are those of the eight bits in which float32 keeps the exponent. Then
come NaN, zero, and the subnormal numbers, by the bits that their digits have as a number of their
own. The last place is the largest magnitude, as bits, which are ordered as the numbers are.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.core import Exponents
from halfstep.torch._native._kernel import kernel_at_hand
from halfstep.torch._private import unwrapped
from halfstep.torch._storages import plain_tensors

_MAGNITUDE, _INF, _DIGITS = 0x7FFFFFFF, 0x7F800000, 23
_FIELDS = 256
_NAN, _ZERO = _FIELDS, _FIELDS + 1
_LARGEST = _ZERO + 127 + _DIGITS
WIDTH = _LARGEST + 1
# As many numbers as the fastest memory of a processor holds.
_CHUNK = 2**17
# The formats that have the exponent of float32, with its bits in an integer, and those below it.
_BITS = {torch.float32: (torch.int32, _DIGITS), torch.bfloat16: (torch.int16, 7)}
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def numbers_in(values: Any) -> Iterator[Tensor]:
    """Yields the floating-point numbers that tensors store, without their history.

    Args:
        values: A tensor, or dicts and lists of them, to any depth.
    """
    plain = type(values) in (Tensor, nn.Parameter) and not values.is_nested
    if plain and values.layout is torch.strided:
        yield from _floats(unwrapped(values.detach()))
        return
    for tensor in plain_tensors(values):
        whole = unwrapped(tensor.detach())
        whole = whole.values() if whole.layout in _COMPRESSED else whole
        yield from _floats(whole.as_subclass(Tensor))


def _floats(plain: Tensor) -> Iterator[Tensor]:
    plain = torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain
    if plain.is_floating_point() and plain.numel() and not plain.is_meta:
        yield plain


def count(numbers: Tensor, row: Tensor) -> None:
    """Adds numbers to a row, in the way that is fast on their device."""
    _COUNT.get(numbers.device.type, _count_anywhere)(numbers, row)


def _count_anywhere(numbers: Tensor, row: Tensor) -> None:
    """Adds numbers in a fixed number of kernels, none of which tells the host anything."""
    bits = numbers.float().reshape(-1).view(torch.int32) & _MAGNITUDE
    places = _places(bits).long()
    row.scatter_add_(0, places, row.new_ones(1).expand_as(places))
    largest = torch.where(bits < _INF, bits, 0).amax()
    row[_LARGEST] = torch.maximum(row[_LARGEST], largest)


def _places(bits: Tensor) -> Tensor:
    """Returns the place in a row that each number belongs to."""
    normal = (bits >> _DIGITS) + (bits > _INF)
    # The digits of a subnormal number as a number: no float is ever computed with, since a
    # processor may be set to take subnormal ones for zero.
    small = (bits.float().view(torch.int32) >> _DIGITS) + _ZERO
    return torch.where(bits < 1 << _DIGITS, small, normal)


def _count_here(numbers: Tensor, row: Tensor) -> None:
    """Adds numbers in the way that is fast where looking at a result costs nothing."""
    values = (numbers if numbers.dtype in _BITS else numbers.float()).reshape(-1)
    found = kernel_at_hand(values.numel())
    if found is not None:
        found.exponents(values.contiguous(), row)
        return
    for chunk in values.split(_CHUNK) if values.numel() > _CHUNK else (values,):
        _count_chunk(chunk, row, row.numpy())


def _count_chunk(chunk: Tensor, row: Tensor, counts: Any) -> None:
    kind, digits = _BITS[chunk.dtype]
    bits = chunk.view(kind)
    # The sign is cut off with what is above eight bits, and counting bytes is twice as fast.
    fields = torch.bincount((bits >> digits).to(torch.uint8), minlength=_FIELDS).numpy()
    zeros = len(bits) - int((bits << 1).count_nonzero()) if fields[0] else 0
    if fields[-1] or fields[0] > zeros:
        _count_anywhere(chunk, row)
        return
    fields[0] = 0
    counts[:_FIELDS] += fields
    counts[_ZERO] += zeros
    low, high = chunk.aminmax()
    counts[_LARGEST] = max(counts[_LARGEST], _bits_of(max(abs(low.item()), abs(high.item()))))


_COUNT: dict[str, Callable[[Tensor, Tensor], None]] = {"cpu": _count_here}


def _bits_of(value: float) -> int:
    return int(struct.unpack("I", struct.pack("f", value))[0])


def exponents_of(row: list[int]) -> Exponents:
    """Returns what a row says."""
    small, normal = row[_LARGEST - _DIGITS : _LARGEST], row[1 : _FIELDS - 1]
    return Exponents(
        tuple(enumerate([*small, *normal], start=-126 - _DIGITS)),
        zeros=row[_ZERO],
        infs=row[_FIELDS - 1],
        nans=row[_NAN],
        largest=struct.unpack("f", struct.pack("I", row[_LARGEST]))[0],
    )
