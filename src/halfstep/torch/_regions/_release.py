"""Gradients that are applied, and freed, as soon as backward has left their region.

What is applied cannot be taken back, so the parameters of a region wait for each other: when all of
their gradients of a pass are there they are checked, and either all of them are stepped or none.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from halfstep.errors import UsageError
from halfstep.torch._masters._step import steps_together
from halfstep.torch._private import (
    accumulates,
    at_end_of_pass,
    backward_pass,
    break_graphs,
    in_transform,
)
from halfstep.torch._regions._guard import Guard, guard
from halfstep.torch._regions._tree import tensors_in
from halfstep.torch._scaling._closure import needs_closure
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._optimizers import checked_optimizer
from halfstep.torch._scaling._released import (
    findings_of,
    refuse_scaled,
    released,
    watch,
)

if TYPE_CHECKING:
    from halfstep.torch._region import Region


class Release:
    """Steps the parameters of a region within backward.

    Args:
        region: The region.
        found: The guard of the optimizer that trains the parameters.
        parameters: Those of the region's own parameters that the optimizer trains.
    """

    def __init__(self, region: "Region", found: Guard, parameters: list[Tensor]) -> None:
        self._region = weakref.ref(region)
        self._guard = weakref.ref(found)
        self._parameters = [TensorWeakRef(each) for each in parameters]
        self._pass = -1
        # When gradients were applied for the last time.
        self._turn = -1
        # The parameters whose gradients of the pass are there.
        self._arrived: dict[int, Tensor] = {}
        # The pass in which a checkpoint computed the region again, and those that applied all.
        self._around = -1
        self._applied: set[int] = set()
        self._unwatch = weakref.finalize(self, watch())
        self._hooks: list[Any] = []
        for each in parameters:
            hook = each.register_post_accumulate_grad_hook(self._arrive)
            self._hooks.append(hook)
        released.add(self)

    def remove(self) -> None:
        """Leaves gradients to the optimizer's step again."""
        released.discard(self)
        self._unwatch()
        for hook in self._hooks:
            hook.remove()

    def parameters(self) -> list[Tensor]:
        """Returns the parameters that are stepped within backward."""
        found = self._guard()
        if found is None or found.optimizer() is None:
            return []
        return [each for each in (ref() for ref in self._parameters) if each is not None]

    def is_left(self) -> bool:
        """Returns whether there is a gradient that was not released."""
        return any(each.grad is not None for each in self.parameters())

    def call(self) -> None:
        """Notes a call of the region, which within backward is one of a checkpoint."""
        self._around = backward_pass()
        self._refuse_applied()

    def left(self, output: Any) -> None:
        """Notes what the region returned.

        A second backward through it meets weights that have changed, of which PyTorch's error does
        not tell why.
        """
        if torch.compiler.is_compiling() or in_transform():
            return
        for each in tensors_in(output):
            if each.grad_fn is not None:
                each.grad_fn.register_prehook(functools.partial(self._enter, self._turn))

    def _enter(self, turn: int, _gradients: Any) -> None:
        found = self._guard()
        if found is not None and turn != self._turn and any(map(_is_reached, self.parameters())):
            self._refuse_another(found)

    def _refuse_applied(self) -> None:
        if backward_pass() in self._applied:
            raise UsageError(
                "A region with release=True needs one gradient per parameter in a backward pass, "
                "got another one after they were applied. Use "
                "torch.utils.checkpoint(use_reentrant=False), or release=False."
            )

    def _refuse_another(self, found: Guard) -> None:
        if self._turn == found.turns.now:
            raise UsageError(
                "A region with release=True needs one backward pass between two steps of its "
                "optimizer, got another one after its gradients were applied. Wrap all but the "
                "last backward in accumulate(optimizer), or call optimizer.step() after each; "
                "inside of the region, use torch.utils.checkpoint(use_reentrant=False)."
            )

    def _arrive(self, parameter: Tensor) -> None:
        found = self._guard()
        if found is None:
            return
        self._refuse_applied()
        self._refuse_another(found)
        # A graph of the gradients themselves needs what they were made from.
        if found.accumulating or torch.is_grad_enabled():
            return
        refuse_scaled()
        if self._pass != backward_pass():
            self._pass, self._arrived = backward_pass(), {}
            at_end_of_pass(self._apply)
        self._arrived[id(parameter)] = parameter
        if len(self._arrived) == len(self._parameters):
            self._apply()

    def _apply(self) -> None:
        region, found = self._region(), self._guard()
        arrived, self._arrived = [*self._arrived.values()], {}
        if not arrived or region is None or found is None:
            return
        # A reentrant checkpoint has a pass of its own within the other one.
        self._applied = {self._pass, self._around} - {-1}
        self._turn = found.turns.apply()
        found.step_part(region, arrived, findings_of(self._pass))
        for parameter in arrived:
            parameter.grad = None


def _is_reached(parameter: Tensor) -> bool:
    """Returns whether the present backward pass adds to the gradient of a parameter."""
    return parameter.requires_grad and accumulates(get_gradient_edge(parameter).node)


break_graphs(Release._arrive)
break_graphs(Release._enter)


def refuse_unreleasable(optimizer: Optimizer, parameters: list[Tensor]) -> None:
    """Raises an error if an optimizer cannot step some parameters of a region before the rest."""
    if steps_together(optimizer) or needs_closure(type(optimizer)):
        raise UsageError(
            "release=True needs an optimizer that steps some parameters without the others and "
            f"without a closure, got {type(optimizer).__name__}. Use release=False, or an "
            "optimizer such as AdamW."
        )
    trained, own = _trained(optimizer), _own(optimizer, parameters)
    if len(own) == len(trained):
        raise UsageError(
            f"release=True needs a part of what the optimizer trains, got all {len(own)} "
            "parameters of it in one region. They are stepped together or not at all, so no "
            "gradient would be freed before the last one is there. Prepare parts: for block in "
            "model.blocks: prepare(block, optimizer, ..., release=True)."
        )


def release(region: "Region", optimizer: Optimizer, parameters: list[Tensor]) -> list[Release]:
    """Lets an optimizer step some parameters of a region within backward."""
    own = _own(optimizer, parameters)
    return [Release(region, guard(optimizer), own)] if own else []


def _own(optimizer: Optimizer, parameters: list[Tensor]) -> list[Tensor]:
    trained = _trained(optimizer)
    return [each for each in parameters if id(each) in trained]


def _trained(optimizer: Optimizer) -> set[int]:
    return {id(each) for each in parameters_of(optimizer) if each.requires_grad}


@contextlib.contextmanager
def accumulate(optimizer: Optimizer) -> Iterator[None]:
    """Lets backward only add up gradients within the block, also where they would be released.

    The first backward after the block adds its own, applies the sum and frees it. Another one
    before `optimizer.step()` is an error.

    Args:
        optimizer: An optimizer of regions that were prepared with `release=True`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
        >>> with accumulate(optimizer):
        ...     optimizer.param_groups[0]["params"][0].sum().backward()
    """
    checked_optimizer(optimizer, "accumulate()")
    found = guard(optimizer)
    before, found.accumulating = found.accumulating, True
    try:
        yield
    finally:
        found.accumulating = before
        found.release()
