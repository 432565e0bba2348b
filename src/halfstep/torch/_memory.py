"""How many bytes training keeps from step to step, and what they are for."""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._masters._kept import kept_tensors
from halfstep.torch._once import once
from halfstep.torch._prepare import prepare
from halfstep.torch._region import Region
from halfstep.torch._regions._unused import UnusedRegionWarning
from halfstep.torch._saved import saved_bytes
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._storages import GradientPeak, StorageCounter, plain_tensors

STEPS = 3
_FLOAT32 = "float32"

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Kept:
    """Bytes that stay from one step to the next, each storage once.

    Args:
        parameters: How many values are trained.
        weights: Of the parameters that are trained.
        remainder: Of what their masters hold besides.
        gradients: Of the gradients after the step.
        state: Of the optimizers' state.
        others: Of buffers, and of parameters that are not trained.
        gradient_peak: The most bytes of gradients at once in a backward pass, None if not watched.
    """

    parameters: int
    weights: int
    remainder: int
    gradients: int
    state: int
    others: int
    gradient_peak: int | None = None


def kept(
    optimizers: Sequence[Optimizer],
    modules: Iterable[nn.Module] = (),
    gradient_peak: int | None = None,
) -> Kept:
    """Returns the bytes that are kept for what some optimizers train.

    Args:
        optimizers: The optimizers.
        modules: Where buffers and other parameters are looked for.
        gradient_peak: What was seen of gradients in the backward pass.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> found = kept([optimizer], [model])
        >>> found.weights, found.gradients, found.state
        (20, 20, 48)
    """
    counter, trained = StorageCounter(), trained_by(*optimizers)
    return Kept(
        parameters=sum(each.numel() for each in trained),
        weights=counter.count(trained),
        remainder=counter.count(list(map(kept_tensors, optimizers))),
        gradients=counter.count([each.grad for each in trained]),
        state=counter.count([each.state for each in optimizers]),
        others=counter.count([[*each.parameters(), *each.buffers()] for each in modules]),
        gradient_peak=gradient_peak,
    )


def trained_by(*optimizers: Optimizer) -> list[Tensor]:
    """Returns the parameters that optimizers train, each once."""
    every = (each for optimizer in optimizers for each in parameters_of(optimizer))
    return once(each for each in every if each.requires_grad)


@dataclass(frozen=True)
class Inputs:
    """What a model is called with.

    Args:
        args: By position.
        kwargs: By name.

    Example:
        >>> Inputs.of(torch.zeros(8, 3)).batch, Inputs.of({"x": torch.zeros(4, 3)}).batch
        (8, 4)
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, given: Any) -> "Inputs":
        """Returns the inputs that a tuple, a dict of names or anything else stands for."""
        if isinstance(given, Mapping):
            return cls((), given)
        return cls(tuple(given) if isinstance(given, tuple | list) else (given,), {})

    @property
    def batch(self) -> int | None:
        """The length of the first tensor, None without one."""
        tensors = plain_tensors([self.args, self.kwargs])
        return next((len(each) for each in tensors if each.dim()), None)

    def doubled(self) -> "Inputs":
        """Returns twice the batch."""
        return Inputs(_doubled(self.args, self.batch), _doubled(self.kwargs, self.batch))


def _doubled(values: Any, batch: int | None) -> Any:
    if isinstance(values, Tensor):
        return torch.cat([values, values]) if values.dim() and len(values) == batch else values
    if isinstance(values, Mapping):
        return {name: _doubled(value, batch) for name, value in values.items()}
    if isinstance(values, tuple | list):
        return type(values)(_doubled(value, batch) for value in values)
    return values


def measure_layout(
    model: nn.Module,
    make: MakeOptimizer,
    inputs: Inputs | None = None,
    *,
    policy: str = _FLOAT32,
    masters: str = "cast",
    release: bool = False,
) -> Kept:
    """Returns what is kept after a few steps; it trains the model, and leaves it prepared.

    Args:
        model: The model, in float32.
        make: Makes an optimizer of parameters.
        inputs: What to call the model with. Without, every parameter gets a gradient of ones.
        policy: What to train under.
        masters: How the exact weights are kept: "cast" or "split".
        release: Whether gradients are applied and freed inside of the backward pass.

    Example:
        >>> measure_layout(nn.Linear(4, 1), torch.optim.SGD, Inputs.of(torch.ones(2, 4))).state
        0
    """
    if release and inputs is None:
        raise UsageError("gradients are released in a backward pass, which needs example inputs")
    trained = [each for each in model.parameters() if each.requires_grad]
    peak, optimizer = GradientPeak(trained), make(trained)
    regions = _prepared(model, optimizer, policy, masters, release)
    with _for_bytes_only(), peak:
        for _ in range(STEPS):
            optimizer.zero_grad()
            _loss(model, trained, inputs).backward()
            optimizer.step()
    _refuse_skipped(regions)
    return kept([optimizer], [model], peak.bytes)


def activation_bytes(model: nn.Module, inputs: Inputs, policy: str = _FLOAT32) -> int:
    """Returns the bytes that one pass keeps for backward; leaves the model prepared.

    Args:
        model: The model.
        inputs: What to call it with.
        policy: What it runs under.

    Example:
        >>> activation_bytes(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), Inputs.of(torch.ones(2, 4)))
        96
    """
    if policy != _FLOAT32:
        prepare(model, policy=policy)
    with saved_bytes() as saved, torch.compiler.set_stance("force_eager"):
        output = model(*inputs.args, **inputs.kwargs)
    del output
    return saved.bytes


def _prepared(
    model: nn.Module, optimizer: Optimizer, policy: str, masters: str, release: bool
) -> list[Region]:
    if policy == _FLOAT32:
        return []
    options: dict[str, Any] = {"masters": masters, "release": release}
    # The parts first: what is left is the whole model's.
    parts = [*_parts(model), model] if release else [model]
    return [prepare(part, optimizer, policy, **options) for part in parts]


def _parts(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a model: what is in its outermost lists, or else its children."""
    found = list[nn.Module]()
    for child in model.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            found += child.children()
        elif not isinstance(child, nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            found += _parts(child) if _has_lists(child) else [child]
    return [part for part in found if any(each.requires_grad for each in part.parameters())]


def _has_lists(module: nn.Module) -> bool:
    return any(isinstance(each, nn.ModuleList) for each in module.modules())


def _loss(model: nn.Module, trained: Sequence[Tensor], inputs: Inputs | None) -> Tensor:
    output = trained if inputs is None else model(*inputs.args, **inputs.kwargs)
    means = [each.float().mean() for each in plain_tensors(output) if each.requires_grad]
    if not means:
        raise UsageError(
            f"The model needs to return tensors with a gradient, got {type(output).__name__}. "
            "Return what a loss could be made of."
        )
    return torch.stack(means).sum()


@contextlib.contextmanager
def _for_bytes_only() -> Iterator[None]:
    """Compiles nothing, which would take longer than all else, and bears models that sit idle."""
    with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore", UnusedRegionWarning)
        yield


def _refuse_skipped(regions: Iterable[Region]) -> None:
    skipped = [each.last_step.reason for each in regions if each.last_step.skipped]
    if skipped:
        raise UsageError(f"a measured step needs finite gradients, got a skip: {skipped[0]}")
