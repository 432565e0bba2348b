"""Runs a piece of code in float32 and inside a region, and compares what comes out."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.torch import autocast

Run = Callable[[], Any]


def tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def weighted_sum(outputs: Any) -> Tensor:
    """Returns a float32 loss that gives every element a weight of its own."""
    generator = torch.Generator().manual_seed(7)
    floats = [tensor.float() for tensor in tensors(outputs) if tensor.is_floating_point()]
    return sum((t * torch.randn(t.shape, generator=generator)).sum() for t in floats)


def trained(model: nn.Module, *args: Any, **kwargs: Any) -> Run:
    """Returns a function that runs forward and backward: outputs and gradients."""

    def run() -> Any:
        outputs = model(*args, **kwargs)
        with autocast("cpu", enabled=False):
            loss = weighted_sum(outputs)
        loss.backward()
        return [outputs, [p.grad for p in model.parameters() if p.grad is not None]]

    return run


def through_linear(function: Callable[[Tensor], Any]) -> Callable[[], Run]:
    """Returns what makes a run of a function on the low output of a linear layer."""

    def make() -> Run:
        layer, inputs = nn.Linear(8, 8), torch.randn(6, 8)

        def run() -> Any:
            result = function(layer(inputs))
            grown = [t for t in tensors(result) if t.requires_grad]
            if grown:
                sum((t.abs() if t.is_complex() else t).float().sum() for t in grown).backward()
            return [t.detach() for t in tensors(result)], layer.weight.grad

        return run

    return make


def _seeded(make: Callable[[], Run], region: Any) -> list[Tensor]:
    torch.manual_seed(0)
    run = make()
    torch.manual_seed(1)
    with region:
        return tensors(run())


def distances(make: Callable[[], Run], low: torch.dtype, rules: str | None = None) -> list[float]:
    """Returns the relative distance of every result inside a region from the one in float32."""
    wide = _seeded(make, autocast("cpu", enabled=False))
    narrow = _seeded(make, autocast("cpu", dtype=low, rules=rules))
    assert len(wide) == len(narrow)
    return [_distance(one, other) for one, other in zip(wide, narrow, strict=True)]


def _distance(wide: Tensor, narrow: Tensor) -> float:
    wide, narrow = wide.detach().to(torch.complex128), narrow.detach().to(torch.complex128)
    assert wide.shape == narrow.shape
    finite = torch.isfinite(wide)
    if not torch.equal(finite, torch.isfinite(narrow)):
        return float("inf")
    return ((wide - narrow)[finite].norm() / (wide[finite].norm() + 1e-3)).item()
