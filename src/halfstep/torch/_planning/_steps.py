"""Times whole steps under policies, which take turns."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from halfstep.core import Policy, override_policy
from halfstep.errors import UsageError
from halfstep.torch._engine import _state
from halfstep.torch._observing._losses import loss_of
from halfstep.torch._observing._untouched import gradients_apart, undrawn
from halfstep.torch._patches import replace
from halfstep.torch._planning._timing import Turn
from halfstep.torch._prepare import prepare
from halfstep.torch._saved import saved_bytes


class Trial:
    """A step that can be run under any policy, and leaves everything as it was.

    Args:
        model: The model.
        batch: What the loss is called with besides.
        loss_fn: Computes the loss of a model and a batch.
        device_type: Where it computes.
    """

    def __init__(
        self, model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], Any], device_type: str
    ) -> None:
        self.model, self._batch, self._loss_fn = model, batch, loss_fn
        self.device_type = device_type

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Lets gradients, buffers and random numbers be as they were when the block ends.

        Compiled models run eagerly, since each policy would be compiled anew.
        """
        buffers = [(each, each.detach().clone()) for each in self.model.buffers()]
        eager = torch.compiler.set_stance("force_eager")
        with eager, undrawn(), gradients_apart(self.model.parameters()):
            try:
                yield
            finally:
                with torch.no_grad():
                    for each, value in buffers:
                        each.copy_(value)

    def check(self) -> None:
        """Raises an error if a step cannot be run, or chooses formats by itself."""
        with _entered() as asked:
            loss = loss_of("plan", self._loss_fn, self.model, self._batch)
        if any(asked):
            raise UsageError(
                "plan needs a loss_fn that leaves the formats to it, got one that enters an "
                "autocast. Leave the autocast out: the plan takes its place."
            )
        if not loss.requires_grad:
            raise UsageError(
                "plan needs a loss with a gradient, got one without. Leave out torch.no_grad() and "
                ".detach(), and let parameters require gradients."
            )

    def forward(self) -> torch.Tensor:
        """Returns the loss."""
        loss: torch.Tensor = self._loss_fn(self.model, self._batch)
        return loss

    def turn(self, policy: Policy) -> Turn:
        """Returns what runs steps under a policy."""

        @contextlib.contextmanager
        def within() -> Iterator[Callable[[], object]]:
            with self.under(policy):
                yield self._step

        return within

    def _step(self) -> None:
        for each in self.model.parameters():
            each.grad = None
        self.forward().backward()

    @contextlib.contextmanager
    def under(self, policy: Policy) -> Iterator[None]:
        """Makes the model a region by a policy, whatever else is in force, until the block ends."""
        if policy.compute_dtype == "float32":
            yield
            return
        with override_policy(policy):
            region = prepare(self.model, policy=policy)
        region._used = True
        try:
            yield
        finally:
            region.remove()

    def saved_bytes(self, policy: Policy) -> int:
        """Returns what a step keeps for backward."""
        with self.under(policy), saved_bytes() as saved:
            loss = self.forward()
        del loss
        return saved.bytes


@contextlib.contextmanager
def _entered() -> Iterator[list[bool]]:
    """Notes for each autocast that is entered in the block whether it casts anything."""
    asked: list[bool] = []

    def native(original: Any, self: Any) -> Any:
        asked.append(self._enabled)
        return original(self)

    def own(original: Any, device_type: str, dtype: Any, enabled: bool, *settings: Any) -> None:
        asked.append(enabled)
        original(device_type, dtype, enabled, *settings)

    undo = replace(torch.autocast, "__enter__", native), replace(_state, "enter", own)
    try:
        yield asked
    finally:
        for each in undo:
            each()
