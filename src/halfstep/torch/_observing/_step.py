"""One step of training, forward and backward, which leaves everything as it was."""

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import UsageError
from halfstep.torch._observing._formats import Asked, Formats, computing, widened
from halfstep.torch._observing._places import Places
from halfstep.torch._observing._ran import Ran
from halfstep.torch._observing._roles import Roles
from halfstep.torch._observing._trial import Trial
from halfstep.torch._observing._untouched import (
    Untouched,
    gradients_apart,
    leaves_of,
    regions_apart,
    undrawn,
)
from halfstep.torch._observing._watching import Watching
from halfstep.torch._once import once


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        model: The model.
        batch: What the loss is called with besides.
        loss_fn: Computes the loss of a model and a batch.
        loss_scale: What multiplies the loss.
        factor: What multiplies the scales of regions.
        settles: Whether regions may back off before anything is told.
        formats: In which formats.
        trial: Looks at operations, and changes them.
        caller: Who is named in errors.
    """

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Any]
    loss_scale: float = 1.0
    factor: float = 1.0
    settles: bool = True
    formats: Formats = field(default_factory=Formats)
    trial: Trial = field(default_factory=Trial)
    caller: str = "diagnose"

    @property
    def name(self) -> str:
        """What the place outside of the model is called."""
        name: str = getattr(self.loss_fn, "__name__", "loss_fn")
        return name if name.isidentifier() else "loss_fn"


@dataclass(frozen=True)
class Step:
    """What happened in a step.

    Args:
        ran: The operations, in order.
        loss_finite: Whether the loss is finite.
        gradients_finite: Whether there are no gradients that are not finite.
        asked: The autocasts that were entered.
    """

    ran: tuple[Ran, ...]
    loss_finite: bool = True
    gradients_finite: bool = True
    asked: tuple[Asked, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether the step is fit to train with."""
        return self.loss_finite and self.gradients_finite

    def finite_in(self, phase: str) -> bool:
        """Returns whether what a pass is for is finite."""
        return self.loss_finite if phase == "forward" else self.finite

    @property
    def made(self) -> list[Ran]:
        """The operations that made something that is not finite."""
        return [each for each in self.ran if each.made is not None and not each.entered]


def run(case: Case) -> Step:
    """Runs a step and returns what happened."""
    untouched, places = Untouched(case.model), Places(case.model, case.name)
    watching = Watching(places, Roles(case.model, case.batch), untouched, _STEPS, case.trial)
    with contextlib.ExitStack() as stack:
        stack.enter_context(undrawn())
        stack.enter_context(regions_apart(case.model, case.factor))
        stack.callback(untouched.restore)
        stack.enter_context(torch.inference_mode(False))
        asked = stack.enter_context(computing(case.formats, case.model))
        stack.enter_context(places.followed())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        with gradients_apart(case.model.parameters()), torch.enable_grad():
            return dataclasses.replace(_seen(case, watching), asked=tuple(dict.fromkeys(asked)))


def _seen(case: Case, watching: Watching) -> Step:
    batch = widened(case.batch) if case.formats.low is torch.float32 else case.batch
    loss = _loss(case, batch, watching)
    finite, gradients_finite = bool(loss.detach().isfinite()), True
    if finite and loss.requires_grad:
        leaves = once([*case.model.parameters(), *leaves_of(loss)])
        with gradients_apart(leaves):
            _backward(loss, watching)
            grads = [each.grad for each in leaves if each.grad is not None]
            gradients_finite = _are_finite(grads)
    return Step(tuple(watching.operations()), finite, gradients_finite)


def _loss(case: Case, batch: Any, watching: Watching) -> Tensor:
    with watching:
        loss = checked_loss(case.loss_fn(case.model, batch), case.caller)
        return loss if case.loss_scale == 1.0 else loss * case.loss_scale


def _backward(loss: Tensor, watching: Watching) -> None:
    watching.begin_backward()
    with watching:
        loss.backward()


def _are_finite(grads: list[Tensor]) -> bool:
    """Returns whether all gradients are; waits once for each device."""
    found: dict[torch.device, list[Tensor]] = {}
    for each in grads:
        found.setdefault(each.device, []).append(_plain(each).isfinite().all())
    return all(bool(torch.stack(group).all()) for group in found.values())


def _plain(grad: Tensor) -> Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def checked_loss(loss: Any, caller: str) -> Tensor:
    """Returns what a loss function returned, if it is a loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise UsageError(
            f"{caller} needs a loss_fn(model, batch) that returns a loss of one number, got "
            f"{found}. Return what the training calls backward() on."
        )
    return loss


# Within these runs what somebody wrote.
_STEPS = (_loss.__code__, _backward.__code__)
