"""Casts of weights, made once per region and version of the weight."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter


class _Entry(NamedTuple):
    weight: weakref.ref[Parameter]
    version: int
    address: int
    cast: Tensor

    def holds_for(self, weight: Parameter) -> bool:
        return (
            self.weight() is weight
            and self.version == weight._version
            and self.address == weight.data_ptr()
        )


class WeightCache:
    """Remembers the low copy of each weight until the weight changes or the region ends.

    Unlike PyTorch's cache it compares the version of the weight, so an optimizer step inside the
    region is noticed, and it keeps apart what was cast with and without a gradient history.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, torch.dtype, bool], _Entry] = {}

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in another dtype, from memory where it is a weight seen before."""
        # Exactly Parameter: what a tracer or functorch passes here lives shorter than the region.
        if type(tensor) is not Parameter or not tensor.requires_grad or tensor.is_inference():
            return tensor.to(dtype)
        key = (id(tensor), dtype, torch.is_grad_enabled())
        entry = self._entries.get(key)
        if entry is not None and entry.holds_for(tensor):
            return entry.cast
        return self._remember(key, tensor, tensor.to(dtype))

    def _remember(
        self, key: tuple[int, torch.dtype, bool], weight: Parameter, cast: Tensor
    ) -> Tensor:
        entries = self._entries
        alive = weakref.ref(weight, lambda _: entries.pop(key, None))
        entries[key] = _Entry(alive, weight._version, weight.data_ptr(), cast)
        return cast

    def clear(self) -> None:
        """Forgets everything, which frees the copies."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class NoCache:
    """Casts anew each time."""

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in another dtype."""
        return tensor.to(dtype)
