"""Gives back what a step has changed: tensors, gradients, random numbers, regions."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.torch._observing._roles import storage
from halfstep.torch._private import preserved_version
from halfstep.torch._regions._forward import forward_of
from halfstep.torch._regions._state import Cells
from halfstep.torch._regions._widening import Skipping

if TYPE_CHECKING:
    from halfstep.torch._region import Region


class Untouched:
    """Keeps tensors that were there before a step as they were, when they are written to."""

    def __init__(self, model: nn.Module) -> None:
        self._created: set[int] = set()
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}
        # The statistics of batch norm are written to without a word in the schema.
        self.keep(list(model.buffers()))

    def created(self, tensors: Iterable[Tensor]) -> None:
        """Takes note of tensors that the step made."""
        self._created.update(map(storage, tensors))

    def is_foreign(self, tensor: Tensor) -> bool:
        """Returns whether a tensor was there before."""
        return storage(tensor) not in self._created

    def keep(self, changed: Iterable[Tensor]) -> None:
        """Keeps the values of tensors that were there before."""
        for each in filter(self.is_foreign, changed):
            dense = each.layout is torch.strided
            view = (each.storage_offset(), each.shape, each.stride()) if dense else ()
            key = (storage(each), *view)
            if key not in self._kept:
                self._kept[key] = each, each.detach().clone()

    def restore(self) -> None:
        """Gives the tensors their values back."""
        with torch.no_grad():
            for each, value in reversed(self._kept.values()):
                target = each.detach()
                with preserved_version(each):
                    target.copy_(value)


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that the gradients of a loss are added to."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [each for each, _ in node.next_functions]


@contextlib.contextmanager
def gradients_apart(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Lets leaves have gradients of their own, and nobody act on them, until the block ends."""
    leaves = [each for each in tensors if each.requires_grad and each.is_leaf]
    before = [(each, each.grad) for each in leaves]
    hooks = [each._post_accumulate_grad_hooks for each in leaves]
    kept = [(held, dict(held)) for held in hooks if held]
    for each in leaves:
        each.grad = None
    for held, _ in kept:
        held.clear()
    try:
        yield
    finally:
        for each, grad in before:
            each.grad = grad
        for held, own in kept:
            held.update(own)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Lets the random generators of the process be as they were when the block ends."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpy, state = sys.modules.get("numpy"), random.getstate()
    drawn = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(state)
        if numpy:
            numpy.random.set_state(drawn)


class Apart:
    """Lets regions apply no gradients, and be as they were once they are given back.

    Args:
        factors: What the scales of regions are multiplied by meanwhile.
    """

    def __init__(self, factors: Mapping["Region", float]) -> None:
        self._factors = factors
        self._forwards: dict[nn.Module, Any] = {}
        self._kept: dict[Region, dict[str, Any]] = {}

    @property
    def regions(self) -> tuple["Region", ...]:
        """The regions that were taken."""
        return tuple(self._kept)

    def take(self, model: nn.Module) -> None:
        """Takes the regions of a model."""
        for each in model.modules():
            if each not in self._forwards:
                forward = self._forwards[each] = forward_of(each)
                if forward is not None:
                    self._take(forward.region)

    def _take(self, region: "Region") -> None:
        self._kept[region] = dict(vars(region))
        factor, cells = self._factors.get(region, 1.0), Cells(*[c.clone() for c in region._cells])
        region._cells = cells._replace(scale=cells.scale * factor)
        region._own_hooks = set(region._own_hooks)
        region._handler = Skipping()
        region._scaled = region._scaled or factor != 1.0
        if region._releases is not None:
            region._releases = []

    def give_back(self) -> None:
        """Lets all of them be what they were."""
        for region, values in self._kept.items():
            vars(region).update(values)
        for module, forward in self._forwards.items():
            _unmake(module, forward)


def _unmake(module: nn.Module, before: Any) -> None:
    """Takes away a region that a global policy has made meanwhile."""
    now = forward_of(module)
    if now is not None and now is not before:
        now.region.remove()
