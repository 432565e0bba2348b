"""Looks closely at a step of a script, whoever wrote it, by running its calls of models again."""

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace as with_changes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.core import Cast, Diagnosis, Plan, Ranges, quiet
from halfstep.torch._called import Call, loss_of, put
from halfstep.torch._chained import fault_of
from halfstep.torch._engine._paths import _unwrapped
from halfstep.torch._global import _is_of_keras, suspended
from halfstep.torch._observing._named import Names, below
from halfstep.torch._observing._ranges import ranges
from halfstep.torch._own import Own
from halfstep.torch._patches import Undo, replace
from halfstep.torch._plan import plan
from halfstep.torch._private import in_backward
from halfstep.torch._recast import casts_of
from halfstep.torch._regions._forward import forward_of
from halfstep.torch._regions._tree import tensors_in
from halfstep.torch._several import earliest, named, together
from halfstep.torch._stepping import note_broken
from halfstep.torch._tried import TOLD_OF, outside_of_autocast
from halfstep.torch._updates import Updates
from halfstep.torch._within import Within

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
        # Those of models that are not trained, through which gradients go to one that is.
        self._passed: deque[Call] = deque(maxlen=_KEPT_CALLS)
        self._names, self._count = Names(), 0
        self._within = Within()
        self._updates = Updates(lambda: self._within.here)
        self._told_casts = False
        self._own = Own()

    def start(self) -> Undo:
        """Begins to keep calls, and returns what ends it.

        Compiled models run eagerly from now on: inside of a graph nothing can be seen.
        """
        torch.compiler.set_stance("force_eager")
        ends = [self._own.start(), note_broken(), replace(nn.Module, "__call__", self._call)]
        ends.append(self._updates.start())

        def end() -> None:
            while ends:
                ends.pop(0)()
            torch.compiler.set_stance("default")

        return end

    def forget(self) -> None:
        """Forgets the calls: their step is over."""
        self._calls.clear()
        self._passed.clear()
        self._updates.forget()
        self._own.scales.forget()

    def expect(self, *, sampled: bool) -> None:
        """Learns whether the next step is to be looked at, once it has changed the parameters."""
        self._updates.keeps = sampled

    @property
    def has_calls(self) -> bool:
        """Whether a model was called in the step; one of Keras is not looked at."""
        return bool(self._calls)

    @property
    def entered_broken(self) -> bool:
        """Whether gradients came back to a model that were not finite and that no model made."""
        calls = self._all_calls
        return any(call.entered_broken for call in calls) and not any(it.broke for it in calls)

    @property
    def derived(self) -> bool:
        """Whether gradients came back that more gradients can be taken of."""
        return any(call.derived for call in self._all_calls)

    @property
    def sizes(self) -> tuple[float, dict[str, float]]:
        """The largest number of the data of the step, and the norm of what each model trains."""
        norms = {
            self._names.of(it.model): self._updates.norm_before(it.model)
            for it in tuple(self._calls)
        }
        return max((call.largest_given for call in tuple(self._calls)), default=0.0), norms

    @property
    def only(self) -> tuple[str, str] | None:
        """The name and the class of the model that is trained, None where there are several."""
        models = {id(call.model): call.model for call in tuple(self._calls)}
        if len(models) != 1:
            return None
        (model,) = models.values()
        return self._names.of(model), type(_unwrapped(model)).__name__

    @property
    def _all_calls(self) -> list[Call]:
        return sorted((*tuple(self._calls), *tuple(self._passed)), key=lambda call: call.number)

    def faults(self, scale: float) -> Diagnosis:
        """Returns the first fault of the step in a model, false if there is none.

        Args:
            scale: What the loss was multiplied by; 1.0 for what a region does inside.
        """
        return outside_of_autocast(lambda: self._faults(scale))

    def _faults(self, scale: float) -> Diagnosis:
        calls, found = self._all_calls, list[Diagnosis]()
        for model in {id(call.model): call.model for call in calls}.values():
            own = [call for call in calls if call.model is model]
            with self._as_before(own), self._apart():
                seen = fault_of(own, self._outer(model, own, scale))
                seen = self._updates.blamed(model, seen)
            plain = self.only is not None and _is_trained(model)
            found.append(seen if plain else named(model, self._names.of(model), seen))
        return earliest(found)

    def ranges(self, scale: float) -> Seen | None:
        """Returns how the numbers of the step lie in each format, None where nothing was called.

        Args:
            scale: What the loss was multiplied by, or the scale of the region.
        """
        return outside_of_autocast(lambda: self._seen(scale))

    def _seen(self, scale: float) -> Seen | None:
        models = self._models(scale, broken=True)  # to be counted, not to be taken for zeros
        seen = [(model, self._ranges(model, loss_fn), outer) for model, loss_fn, outer in models]
        if not seen:
            return None
        model, first, outer = seen[0]
        found = [(each, ranges) for each, ranges, _ in seen]
        casts = () if self._told_casts else tuple(self._all_casts([each for each, _ in found]))
        self._told_casts = True
        joint = together({self._names.of(each): ranges for each, ranges in found})
        return Seen(joint, _power(model, first, scale, outer), casts)

    def _all_casts(self, models: list[nn.Module]) -> Iterator[Cast]:
        """Yields the casts of all models, below their names where there are several."""
        for model in models:
            name = self._names.of(model) if len(models) > 1 else ""
            for cast in self._casts(model):
                path = below(name, cast.module) if name else cast.module
                yield with_changes(cast, module=path or type(model).__name__)

    def plan(self, *, seconds: float, budget: float, tell: Callable[[str], None]) -> Plan | None:
        """Returns the policy under which the largest model of the step is fastest, with its calls.

        Args:
            seconds: About how long to measure.
            budget: How far an operation may be from float32.
            tell: Is told what is measured.
        """
        return outside_of_autocast(lambda: self._plan(seconds=seconds, budget=budget, tell=tell))

    def _plan(self, **settings: Any) -> Plan | None:
        for model, loss_fn, _ in self._models(1.0):
            with self._as_before(self._calls_of(model)):
                return plan(model, (), loss_fn, **settings)
        return None

    def _ranges(self, model: nn.Module, loss_fn: Callable[..., Tensor]) -> Ranges:
        with self._as_before(self._calls_of(model)):
            found = ranges(model, (), loss_fn, optimizer=self._updates.optimizer_of(model))
        return found if math.isfinite(found.entering) else with_changes(found, entering=0.0)

    def _models(
        self, scale: float, *, broken: bool = False
    ) -> Iterator[tuple[nn.Module, Callable[..., Tensor], float]]:
        """Yields models, the one of the most parameters first, with a loss and its scale."""
        models = list({id(call.model): call.model for call in tuple(self._calls)}.values())
        for model in sorted(models, key=_size, reverse=True):
            calls = self._calls_of(model)
            outer = self._outer(model, calls, scale)
            with self._apart():
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
    def _apart(self) -> Iterator[None]:
        """Lets nobody be told of what runs until the block ends."""
        with quiet(*_EVENTS), self._within.call(), suspended():
            yield

    @contextlib.contextmanager
    def _as_before(self, calls: list[Call]) -> Iterator[None]:
        """Lets a model be what it was before its calls, until the block ends."""
        before = [*calls[0].buffers, *self._updates.before]
        now = [(each, each.clone()) for each, _ in before]
        try:
            put(before)
            yield
        finally:
            put(now)

    def _casts(self, model: nn.Module) -> list[Cast]:
        with quiet(*_EVENTS), self._within.call():
            return list(casts_of(model, self._calls_of(model)))

    def _call(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._within.holds(module) or in_backward() or not torch.is_grad_enabled():
            return original(module, *args, **kwargs)
        kind: Any = type(module)
        given, trained = tensors_in((args, kwargs)), _is_trained(module)
        if _is_of_keras(kind) or not (trained or any(it.requires_grad for it in given)):
            return original(module, *args, **kwargs)
        self._names.of(module)
        self._count += 1
        call = Call.of(module, args, kwargs, self._own.around, self._count)
        with self._within.call(module):
            output = original(module, *args, **kwargs)
        call.made(given, tensors_in(output), self._own.scales.backward)
        (self._calls if trained else self._passed).append(call)
        return output


def _is_trained(model: nn.Module) -> bool:
    return any(each.requires_grad for each in model.parameters())


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
