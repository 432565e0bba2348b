"""What the optimizers of a script make of its parameters, step by step."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep.core import Change, Diagnosis, Exponents, Fault, Format, Moment, written
from halfstep.torch._dtypes import HALF, format_of
from halfstep.torch._masters._kept import master_of
from halfstep.torch._observing._sizes import largest, norm_of
from halfstep.torch._patches import Undo

_KEPT = 4
_TOLD = ("lr", "eps", "weight_decay", "momentum")
_ALWAYS = ("lr", "eps")
_EPS = (
    "eps={eps:g} is 0 in {dtype}, so that the step divides by 0 where a second moment vanished; "
    "eps={instead:g} is not, but masters keep the updates, too"
)
_RATE = "its gradients were finite: lower the learning rate"
_SET = "{name} is no number that can be: look at what sets it, such as a schedule"
_BROKEN = "its gradients were not finite, and nothing skipped the step"
_MASTERS = "keep_masters(optimizer)  # once the optimizer is made"


class _Update(NamedTuple):
    """A step of an optimizer: parameters, and the largest numbers in them and their gradients."""

    optimizer: weakref.ref[Optimizer]
    rows: list[tuple[weakref.ref[Tensor], Tensor, Tensor]]


class Updates:
    """Follows the steps of optimizers.

    Args:
        ignores: Tells whether those that run now are none of the script.

    Example:
        >>> updates, weight = Updates(lambda: False), nn.Parameter(torch.ones(1))
        >>> end, optimizer = updates.start(), torch.optim.SGD([weight], lr=0.5)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> end()
        >>> [before for _, before in updates.before]
        [tensor([1.])]
    """

    def __init__(self, ignores: Callable[[], bool]) -> None:
        self._ignores = ignores
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._made: deque[_Update] = deque(maxlen=_KEPT)
        # Whether what is trained is to be kept as it is before the step, and what was.
        self.keeps, self.before = True, list[tuple[Tensor, Tensor]]()

    def start(self) -> Undo:
        """Begins to follow, and returns what ends it."""
        handles = [
            register_optimizer_step_pre_hook(self._begin),
            register_optimizer_step_post_hook(self._end),
        ]

        def end() -> None:
            for each in handles:
                each.remove()

        return end

    def forget(self) -> None:
        """Lets go of what was before the step."""
        self.before.clear()

    def optimizer_of(self, model: nn.Module) -> Optimizer | None:
        """Returns the optimizer of a model, None where it has several or none."""
        own = {id(each) for each in model.parameters()}
        trains = [it for it in self._optimizers if any(id(each) in own for each in _trained(it))]
        is_one = len(trains) == 1 and not isinstance(trains[0], torch.optim.LBFGS)
        return trains[0] if is_one else None

    def norm_before(self, model: nn.Module) -> float:
        """Returns the norm of all that is trained in a model, before the step where that is known.

        Args:
            model: The model.
        """
        before = {id(each): value for each, value in self.before}
        values = (before.get(id(each), each) for each in model.parameters() if each.requires_grad)
        return math.hypot(*(float(norm_of(each)) for each in values))

    def blamed(self, model: nn.Module, found: Diagnosis) -> Diagnosis:
        """Returns a diagnosis in which parameters that an optimizer broke are told as such.

        Args:
            model: The model.
            found: What was found in it.
        """
        known = dict(model.named_parameters())
        faults = [
            _of_update(each, *self._breaking(known.get(each.parameter))) for each in found.faults
        ]
        # What to write is told once.
        later = [replace(each, note="", remedy="", changes=()) for each in faults[1:]]
        return replace(found, faults=(*faults[:1], *later))

    def _breaking(self, parameter: Tensor | None) -> tuple[Tensor | None, Optimizer | None, bool]:
        """Returns a parameter, what optimizer broke it, and whether the gradient was finite."""
        for update in self._made if parameter is not None else ():
            for ref, size, gradient in update.rows:
                if ref() is parameter and not math.isfinite(size):
                    return parameter, update.optimizer(), math.isfinite(gradient)
        return parameter, None, True

    def _begin(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        known = {id(each) for each, _ in self.before}
        keeps = self.keeps and not self._ignores()
        new = [each for each in _trained(optimizer) if keeps and id(each) not in known]
        self.before += [(each, each.detach().clone()) for each in new]

    @torch.no_grad()
    def _end(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._ignores():
            return
        self._optimizers.add(optimizer)
        rows = [
            (weakref.ref(each), largest(each), largest(each.grad))
            for each in _trained(optimizer)
            if each.grad is not None
        ]
        self._made.append(_Update(weakref.ref(optimizer), rows))


def _trained(optimizer: Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _of_update(
    fault: Fault, parameter: Tensor | None, optimizer: Optimizer | None, finite: bool
) -> Fault:
    """Returns the fault of an optimizer, where it is one, in place of that of its parameter."""
    if optimizer is None or parameter is None or fault.operation != "data":
        return fault
    options = {name: _option(optimizer, parameter, name) for name in _TOLD}
    given = ", ".join(
        f"{name}={value:g}" for name, value in options.items() if _matters(name, value)
    )
    note, changes = _explained(parameter, options, finite)
    step = f"a step of {type(optimizer).__name__} ({given})"
    told = replace(fault, operation="update", in_float32=False)
    return replace(told, source=step, note=note, changes=changes, remedy=written(changes))


def _option(optimizer: Optimizer, parameter: Tensor, name: str) -> float | None:
    groups = optimizer.param_groups
    own = (each for each in groups if any(one is parameter for one in each["params"]))
    value = next(own, {}).get(name)
    return None if value is None else float(value)


def _matters(name: str, value: float | None) -> bool:
    return value is not None and (name in _ALWAYS or not math.isfinite(value))


def _explained(
    parameter: Tensor, options: dict[str, float | None], finite: bool
) -> tuple[str, tuple[Change, ...]]:
    """Returns why a step made something that is not finite, and what to write."""
    broken = [name for name, value in options.items() if not math.isfinite(value or 0.0)]
    if broken:
        return _SET.format(name=" and ".join(broken)), ()
    dtype, eps = format_of(parameter.dtype), options["eps"]
    is_low = parameter.dtype in HALF and master_of(parameter) is None
    masters = (Change(_MASTERS, "parameters"),) if is_low else ()
    if not finite:
        return _BROKEN, ()
    if is_low and eps is not None and Moment("", dtype, eps, Exponents()).eps_vanishes:
        instead = 10.0 ** math.ceil(math.log10(Format.named(dtype).min_normal))
        return _EPS.format(eps=eps, dtype=dtype, instead=instead), masters
    return _RATE, masters
