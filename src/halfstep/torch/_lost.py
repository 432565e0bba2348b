"""Counts the weights whose update rounds to nothing."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._once import once
from halfstep.torch._scaling._gradients import ParameterNames

_SHOWN = 10


class LostUpdates:
    """What `lost_updates` has counted so far, by the name of the parameter.

    Example:
        >>> LostUpdates().fraction
        0.0
    """

    def __init__(self) -> None:
        # How many weights had a gradient, and how many of those stayed what they were.
        self._counts: dict[str, tuple[Tensor, Tensor]] = {}
        self._named: dict[str, list[int]] = {}

    @property
    def fractions(self) -> dict[str, float]:
        """The fraction of each parameter's weights with a gradient that did not change."""
        return {
            name: lost.item() / max(asked.item(), 1) for name, (asked, lost) in self._counts.items()
        }

    @property
    def fraction(self) -> float:
        """The fraction over all parameters."""
        asked = sum(int(each.item()) for each, _ in self._counts.values())
        return sum(int(each.item()) for _, each in self._counts.values()) / max(asked, 1)

    def label(self, name: str, parameter: Tensor) -> str:
        """Returns a name that no other parameter has, such as `weight (2)` for a second one."""
        alike = self._named.setdefault(name, [])
        if id(parameter) not in alike:
            alike.append(id(parameter))
        place = alike.index(id(parameter))
        return f"{name} ({place + 1})" if place else name

    def add(self, name: str, asked: Tensor, lost: Tensor) -> None:
        """Counts one step of one parameter, without waiting for the device."""
        before = self._counts.get(name, (torch.zeros_like(asked), torch.zeros_like(lost)))
        self._counts[name] = before[0] + asked, before[1] + lost

    def __str__(self) -> str:
        if not self._counts:
            return "no step with gradients was seen"
        worst = sorted(self.fractions.items(), key=lambda pair: -pair[1])
        lines = [f"{fraction:7.1%}  {name}" for name, fraction in worst[:_SHOWN]]
        hidden = [f"and {len(worst) - _SHOWN} more"] if len(worst) > _SHOWN else []
        return "\n".join([f"{self.fraction:7.1%}  of all updates changed nothing", *lines, *hidden])

    __repr__ = __str__


class _Watcher:
    """Compares the parameters of an optimizer before and after its steps.

    Args:
        names: What they are called.
        lost: Where it is counted.
    """

    def __init__(self, names: ParameterNames, lost: LostUpdates) -> None:
        self._names = names
        self._lost = lost
        self._before: list[tuple[str, Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def note(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Keeps the values, and where there is a gradient."""
        self._before = [
            (self._lost.label(name, each), each, each.detach().clone(), _dense(each.grad) != 0)
            for name, each in self._names.of(optimizer)
            if each.grad is not None
        ]

    @torch.no_grad()
    def count(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        """Counts what did not change, unless the kernel was told to change nothing."""
        found = getattr(optimizer, "found_inf", None)
        for name, parameter, before, asked in self._before:
            if found is not None:
                asked &= found.to(asked.device) == 0
            self._lost.add(name, asked.sum(), (asked & (parameter.detach() == before)).sum())
        self._before = []


def _dense(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


@contextlib.contextmanager
def lost_updates(
    optimizer: Optimizer | Iterable[Optimizer],
    named_parameters: nn.Module | Iterable[tuple[str, Tensor]] | None = None,
) -> Iterator[LostUpdates]:
    """Counts, within the block, the weights that have a gradient and that a step does not change.

    In bfloat16 a weight moves only if its update is larger than 1/512 of it, so at a usual learning
    rate most updates round to nothing. With masters they are kept, and the count tells how many
    would have been lost without: it looks at the stored parameter. It takes the memory of a copy
    of the parameters while the optimizer steps.

    Args:
        optimizer: Whose steps, of one or several optimizers.
        named_parameters: A module, or pairs of name and parameter, for the names; unneeded if the
            optimizer was made from `model.named_parameters()`.

    Yields:
        The counts so far.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([("weight", weight)], lr=1e-3)
        >>> weight.grad = torch.tensor([0.0, 1.0, 1.0, 100.0]).bfloat16()
        >>> with lost_updates(optimizer) as lost:
        ...     optimizer.step()
        >>> print(lost)
          66.7%  of all updates changed nothing
          66.7%  weight
    """
    with counted(_checked(optimizer), ParameterNames(named_parameters)) as lost:
        yield lost


def _checked(optimizer: Any) -> list[Optimizer]:
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, nn.Module)
    found = once(optimizer if several else [optimizer])
    for each in found:
        if not hasattr(each, "register_step_pre_hook"):
            raise UsageError(
                f"lost_updates() needs a torch.optim.Optimizer, or a list of them, got "
                f"{type(each).__name__}. Pass the optimizer that trains the model."
            )
    return found


@contextlib.contextmanager
def counted(optimizers: Iterable[Optimizer], names: ParameterNames) -> Iterator[LostUpdates]:
    """Counts what `lost_updates` does, for several optimizers together."""
    lost = LostUpdates()
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            watcher = _Watcher(names, lost)
            stack.callback(optimizer.register_step_pre_hook(watcher.note).remove)
            stack.callback(optimizer.register_step_post_hook(watcher.count).remove)
        yield lost
