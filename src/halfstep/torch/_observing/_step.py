"""One step of training, forward and backward, which leaves everything as it was."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.torch._observing._force import Force
from halfstep.torch._observing._formats import Formats, computing, widened
from halfstep.torch._observing._losses import backward, loss_of
from halfstep.torch._observing._places import Places
from halfstep.torch._observing._ran import Ran
from halfstep.torch._observing._roles import Roles
from halfstep.torch._observing._sizes import is_finite
from halfstep.torch._observing._trial import Trial
from halfstep.torch._observing._untouched import (
    Apart,
    Untouched,
    gradients_apart,
    leaves_of,
    undrawn,
)
from halfstep.torch._observing._watching import Watching
from halfstep.torch._once import once
from halfstep.torch._private import unwatched

if TYPE_CHECKING:
    from halfstep.torch._region import Region


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        model: The model.
        batch: What the loss is called with besides.
        loss_fn: Computes the loss of a model and a batch.
        loss_scale: What multiplies the loss.
        factors: What multiplies the scales of regions.
        settles: Whether regions may back off before anything is told.
        formats: In which formats.
        trial: Looks at operations, and changes them.
        caller: Who is named in errors.
        tells_loss: Whether the loss is the one that the training knows.
    """

    model: nn.Module
    batch: Any
    loss_fn: Callable[[Any, Any], Any]
    loss_scale: float = 1.0
    factors: Mapping["Region", float] = field(default_factory=dict)
    settles: bool = True
    formats: Formats = field(default_factory=Formats)
    trial: Trial = field(default_factory=Trial)
    caller: str = "diagnose"
    tells_loss: bool = True

    def scaled(self, regions: Iterable["Region"], by: float) -> "Case":
        """Returns a case in which the scales of regions are other ones."""
        changed = {each: self.factors.get(each, 1.0) * by for each in regions}
        return dataclasses.replace(self, factors={**self.factors, **changed})

    def scale_of(self, region: "Region") -> float:
        """Returns the scale that a region has in it."""
        return region.scale * self.factors.get(region, 1.0)

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
        loss: The loss, not scaled.
        regions: The regions of all models that were called.
        has_gradient: Whether the loss has one.
    """

    ran: tuple[Ran, ...]
    loss_finite: bool = True
    gradients_finite: bool = True
    loss: float = 0.0
    regions: tuple["Region", ...] = ()
    has_gradient: bool = True

    @property
    def finite(self) -> bool:
        """Whether the step is fit to train with."""
        return self.loss_finite and self.gradients_finite

    def finite_in(self, phase: str) -> bool:
        """Returns whether what a pass is for is finite."""
        return self.loss_finite if phase == "forward" else self.finite

    @property
    def called(self) -> set["Region"]:
        """The regions in which something ran."""
        return {each.way.region for each in self.ran if each.way and each.way.region}

    @property
    def made(self) -> list[Ran]:
        """The operations that made something that is not finite."""
        return [each for each in self.ran if each.made is not None and not each.entered]


def run(case: Case) -> Step:
    """Runs a step and returns what happened."""
    untouched, apart = Untouched(case.model), Apart(case.factors)

    places = Places(case.model, case.name, functools.partial(_meet, untouched, apart))
    force, roles = Force(places, _STEPS), Roles(case.model, case.batch)
    watching = Watching(places, force, roles, untouched, _STEPS, case.trial)
    with contextlib.ExitStack() as stack:
        stack.enter_context(undrawn())
        stack.callback(apart.give_back)
        stack.callback(untouched.restore)
        stack.enter_context(torch.inference_mode(False))
        apart.take(case.model)
        stack.enter_context(computing(case.formats, force, case.model))
        stack.enter_context(places.followed())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        with gradients_apart(case.model.parameters()), torch.enable_grad():
            return dataclasses.replace(_seen(case, watching), regions=apart.regions)


def _meet(untouched: Untouched, apart: Apart, model: nn.Module) -> None:
    """Keeps what a model other than the one that is looked at may change."""
    with unwatched():
        untouched.keep(list(model.buffers()))
        apart.take(model)


def _seen(case: Case, watching: Watching) -> Step:
    batch = widened(case.batch) if case.formats.low is torch.float32 else case.batch
    plain, loss = _loss(case, batch, watching)
    finite, gradients_finite = bool(loss.detach().isfinite()), True
    if finite and loss.requires_grad:
        leaves = once([*case.model.parameters(), *leaves_of(loss)])
        with gradients_apart(leaves):
            _backward(case, loss, watching)
            grads = [each.grad for each in leaves if each.grad is not None]
            gradients_finite = are_finite(grads)
    seen = Step(tuple(watching.operations()), finite, gradients_finite, float(plain.detach()))
    return dataclasses.replace(seen, has_gradient=loss.requires_grad)


def _loss(case: Case, batch: Any, watching: Watching) -> tuple[Tensor, Tensor]:
    """Returns the loss, and what training calls backward() on."""
    with watching:
        loss = loss_of(case.caller, case.loss_fn, case.model, batch)
        return loss, loss if case.loss_scale == 1.0 else loss * case.loss_scale


def _backward(case: Case, loss: Tensor, watching: Watching) -> None:
    watching.begin_backward()
    with watching:
        backward(case.caller, loss)


def are_finite(grads: list[Tensor]) -> bool:
    """Returns whether all gradients are; waits once for each device."""
    found: dict[torch.device, list[Tensor]] = {}
    for each in grads:
        found.setdefault(each.device, []).append(is_finite(each))
    return all(bool(torch.stack(group).all()) for group in found.values())


# Within these runs what somebody wrote.
_STEPS = (_loss.__code__, _backward.__code__)
