"""Looks closely at a step of a script, whoever wrote it, by running its calls of models again."""

import contextlib
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace as with_changes
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from halfstep.core import Cast, Diagnosis, Plan, Ranges, quiet
from halfstep.torch._called import Call, loss_of, put
from halfstep.torch._engine import _state
from halfstep.torch._global import _is_of_keras, suspended
from halfstep.torch._observing._diagnosis import diagnosis
from halfstep.torch._observing._ranges import ranges
from halfstep.torch._observing._step import Case
from halfstep.torch._own import Own
from halfstep.torch._patches import Undo, replace
from halfstep.torch._plan import plan
from halfstep.torch._private import autocast_devices, in_backward
from halfstep.torch._recast import casts_of
from halfstep.torch._regions._forward import forward_of
from halfstep.torch._regions._tree import tensors_in
from halfstep.torch._stepping import note_broken
from halfstep.torch._tried import TOLD_OF, tried
from halfstep.torch._within import Within

Found = TypeVar("Found")

_KEPT_CALLS = 8
_EVENTS = (*TOLD_OF, "metric", "nonfinite", "scale", "step", "update")


class Seen(NamedTuple):
    """What a look at the ranges of a step has shown.

    Args:
        ranges: The magnitudes of all models.
        power: The exponent of the scale that multiplied the gradients.
        casts: What the rules cast.
    """

    ranges: Ranges
    power: int
    casts: tuple[Cast, ...]


class Looking:
    """Keeps what the present step of a script calls its models with, until the next one.

    A loss is not known as a function of a model here, but its gradient is: what came back to the
    outputs is what it is computed from again.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> looking = Looking()
        >>> end = looking.start()
        >>> (model(torch.ones(3, 4)).sum() * 2.0**-30).backward()
        >>> end()
        >>> seen = looking.ranges(scale=1.0)
        >>> seen.ranges.modules, seen.ranges.lost()
        (('Linear',), 1.0)
    """

    # What a script computes of the outputs of its models is not seen.
    whole, notes = False, ()

    def __init__(self) -> None:
        self._calls: deque[Call] = deque(maxlen=_KEPT_CALLS)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._within = Within()
        self._told_casts = False
        self._own = Own()

    def start(self) -> Undo:
        """Begins to keep calls, and returns what ends it.

        Compiled models run eagerly from now on: inside of a graph nothing can be seen.
        """
        torch.compiler.set_stance("force_eager")
        ends = [self._own.start(), note_broken(), replace(nn.Module, "__call__", self._call)]
        ends.append(register_optimizer_step_post_hook(self._stepped).remove)

        def end() -> None:
            while ends:
                ends.pop(0)()
            torch.compiler.set_stance("default")

        return end

    def forget(self) -> None:
        """Forgets the calls: their step is over."""
        self._calls.clear()
        self._own.scales.forget()

    @property
    def has_calls(self) -> bool:
        """Whether a model was called in the step; one of Keras is not looked at."""
        return bool(self._calls)

    @property
    def entered_broken(self) -> bool:
        """Whether gradients came back to a model that were not finite already."""
        return any(call.entered_broken for call in tuple(self._calls))

    def faults(self, scale: float) -> Diagnosis:
        """Returns the first fault of the step in a model, false if there is none.

        Args:
            scale: What the loss was multiplied by; 1.0 for what a region does inside.
        """
        return _outside(lambda: self._faults(scale))

    def _faults(self, scale: float) -> Diagnosis:
        found, several = Diagnosis(), len({id(call.model) for call in tuple(self._calls)}) > 1
        for model, loss_fn, outer in self._models(scale):
            case = Case(model, (), loss_fn, outer, tells_loss=False)
            with self._as_before(model), tried(case, None):
                found = diagnosis(case)
            if found:
                return _of(model, found) if several else found
        return found

    def ranges(self, scale: float) -> Seen | None:
        """Returns how the numbers of the step lie in each format, None where nothing was called.

        Args:
            scale: What the loss was multiplied by, or the scale of the region.
        """
        return _outside(lambda: self._seen(scale))

    def _seen(self, scale: float) -> Seen | None:
        models = self._models(scale, broken=True)  # to be counted, not to be taken for zeros
        seen = [(model, self._ranges(model, loss_fn), outer) for model, loss_fn, outer in models]
        if not seen:
            return None
        model, first, outer = seen[0]
        found = [(each, ranges) for each, ranges, _ in seen]
        casts = () if self._told_casts else tuple(self._all_casts([each for each, _ in found]))
        self._told_casts = True
        return Seen(_together(found), _power(model, first, scale, outer), casts)

    def _all_casts(self, models: list[nn.Module]) -> Iterator[Cast]:
        """Yields the casts of all models, below their names where there are several."""
        for model in models:
            kind = type(model).__name__
            for cast in self._casts(model):
                path = _below(kind, cast.module) if len(models) > 1 else cast.module
                yield with_changes(cast, module=path or kind)

    def plan(self, *, seconds: float, budget: float, tell: Callable[[str], None]) -> Plan | None:
        """Returns the policy under which the largest model of the step is fastest, with its calls.

        Args:
            seconds: About how long to measure.
            budget: How far an operation may be from float32.
            tell: Is told what is measured.
        """
        return _outside(lambda: self._plan(seconds=seconds, budget=budget, tell=tell))

    def _plan(self, **settings: Any) -> Plan | None:
        for model, loss_fn, _ in self._models(1.0):
            with self._as_before(model):
                return plan(model, (), loss_fn, **settings)
        return None

    def _ranges(self, model: nn.Module, loss_fn: Callable[..., Tensor]) -> Ranges:
        found = ranges(model, (), loss_fn, optimizer=self._optimizer(model))
        return found if math.isfinite(found.entering) else with_changes(found, entering=0.0)

    def _optimizer(self, model: nn.Module) -> Optimizer | None:
        """Returns the optimizer of a model, None where it has several or none."""
        own = {id(each) for each in model.parameters()}
        trains = [
            each
            for each in self._optimizers
            if any(id(param) in own for group in each.param_groups for param in group["params"])
        ]
        is_one = len(trains) == 1 and not isinstance(trains[0], torch.optim.LBFGS)
        return trains[0] if is_one else None

    def _models(
        self, scale: float, *, broken: bool = False
    ) -> Iterator[tuple[nn.Module, Callable[..., Tensor], float]]:
        """Yields models, the one of the most parameters first, with a loss and its scale."""
        models = list({id(call.model): call.model for call in tuple(self._calls)}.values())
        for model in sorted(models, key=_size, reverse=True):
            calls = self._calls_of(model)
            outer = self._outer(model, calls, scale)
            with quiet(*_EVENTS), self._within.call(), suspended():
                yield model, loss_of(calls, outer, broken=broken), outer

    def _calls_of(self, model: nn.Module) -> list[Call]:
        return [call for call in tuple(self._calls) if call.model is model]

    def _outer(self, model: nn.Module, calls: list[Call], scale: float) -> float:
        """Returns the scale in the gradients outside of a model."""
        if forward_of(model) is not None:
            return 1.0
        own = [call.scale for call in calls if call.scale is not None]
        # Before the way back it is known of the loss alone.
        return own[-1] if own else self._own.scales.latest() or scale

    @contextlib.contextmanager
    def _as_before(self, model: nn.Module) -> Iterator[None]:
        """Lets the buffers of a model be what they were before the step, until the block ends."""
        buffers = next(call.buffers for call in tuple(self._calls) if call.model is model)
        now = [(each, each.clone()) for each, _ in buffers]
        try:
            put(buffers)
            yield
        finally:
            put(now)

    def _casts(self, model: nn.Module) -> list[Cast]:
        with quiet(*_EVENTS), self._within.call():
            return list(casts_of(model, self._calls_of(model)))

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._within.here:
            self._optimizers.add(optimizer)

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._within.holds(module) or in_backward() or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        kind: Any = type(module)
        if _is_of_keras(kind) or not any(it.requires_grad for it in module.parameters()):
            return original(module, *args, **kwargs)
        call = Call.of(module, args, kwargs, self._own.around)
        with self._within.call(module):
            output = original(module, *args, **kwargs)
        call.made(tensors_in(output), self._own.scales.backward)
        self._calls.append(call)
        return output


def _outside(look: Callable[[], Found]) -> Found:
    """Looks outside of any autocast that the script is in: a thread of its own is in none."""
    if not (_state.entered() or any(map(torch.is_autocast_enabled, autocast_devices()))):
        return look()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()


def _size(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _power(model: nn.Module, found: Ranges, scale: float, outer: float) -> int:
    """Returns the exponent of what multiplied the gradients inside of a model."""
    forward = forward_of(model)
    if forward is None:
        return math.frexp(outer)[1] - 1
    # A region multiplies whatever enters to the size of its scale.
    power = math.frexp(scale)[1] - 1
    return power - math.frexp(found.entering)[1] if forward.region._scaled else 0


def _of(model: nn.Module, found: Diagnosis) -> Diagnosis:
    """Returns what was found with the name of the model before those of its modules."""
    name = type(model).__name__
    faults = tuple(
        each if each.module == name else with_changes(each, module=_below(name, each.module))
        for each in found.faults
    )
    return with_changes(found, faults=faults)


def _together(found: list[tuple[nn.Module, Ranges]]) -> Ranges:
    """Returns the ranges of several models as one, their modules below the names of the models."""
    _, first = found[0]
    if len(found) == 1:
        return first
    rows = [
        with_changes(row, module=_below(type(model).__name__, row.module))
        for model, each in found
        for row in each.rows
    ]
    return with_changes(first, rows=tuple(rows))


def _below(name: str, path: str) -> str:
    return f"{name}.{path}" if path else name
