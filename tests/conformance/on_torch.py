"""How PyTorch's side moves a loss scale: through a GradScaler, and through a region."""

import contextlib
import math
import warnings
from collections.abc import Iterator

import torch

from halfstep import LossScale, Policy
from halfstep.errors import NonFiniteError
from halfstep.torch import GradScaler, SkippedStepsWarning, prepare
from halfstep.torch._regions._state import settled
from tests.conformance.front_ends import After

GRADIENTS = {"+": 1.0, "x": math.nan}


class Product(torch.nn.Module):
    """A weight times a number, whose gradient overflows inside of the model where it is told so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.inside = 1.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weight = self.weight * 1.0
        if weight.requires_grad:
            weight.register_hook(lambda gradient: gradient * self.inside)
        return weight * inputs


def scaler(rule: LossScale, steps: str) -> Iterator[After]:
    """A loop with a scaler."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = GradScaler("cpu", **rule.to_dict())
    for letter in steps:
        optimizer.zero_grad()
        model.inside = GRADIENTS[letter]
        scaler.scale(model(torch.ones(1)).sum()).backward()
        with _whatever_is_said():
            scaler.step(optimizer)
        with _whatever_is_said():
            scaler.update()
        yield After(*scaler._cell.read(), scaler.history.skipped)


def region(rule: LossScale, steps: str) -> Iterator[After]:
    """A loop with a region, whose scale is a proven one, like that of a scaler."""
    model = Product()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    region = prepare(model, optimizer, Policy(compute_dtype="float16", scale=rule))
    region.load_state_dict(GradScaler("cpu", **rule.to_dict()).state_dict())
    for letter in steps:
        optimizer.zero_grad()
        model.inside = GRADIENTS[letter]
        model(torch.ones(1)).sum().backward()
        with _whatever_is_said():
            optimizer.step()
        yield After(*settled(region._cells, rule)[:3], region.history.skipped)


@contextlib.contextmanager
def _whatever_is_said() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.suppress(NonFiniteError):
        warnings.simplefilter("ignore", SkippedStepsWarning)
        yield
