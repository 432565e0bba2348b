"""An optimizer that takes no step from gradients that are not finite."""

import functools
import types
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.core import emit, listening
from halfstep.torch._regions._state import faults
from halfstep.torch._scaling._closure import (
    NonFiniteEvaluationError,
    Snapshot,
    closure_of,
    with_closure,
)
from halfstep.torch._scaling._fused import lacks_state, takes_scaler
from halfstep.torch._scaling._gradients import ParameterNames, check, gradients_of
from halfstep.torch._scaling._iteration import total
from halfstep.torch._scaling._optimizers import PerOptimizer
from halfstep.torch._scaling._records import Facts, skipped_record, unknown_record
from halfstep.torch._scaling._steps import Lazy, StepRecord
from halfstep.torch._telling import is_telling, telling

if TYPE_CHECKING:
    from halfstep.torch._region import Region

CHANGED = "a gradient overflowed inside the model, and was made finite since"
ARRIVED = "the gradient that reached the model was not finite"
# How often a closure is evaluated again, at half the scale each time.
_ATTEMPTS = 32
_POLLED_EVERY = 64

_guards: "PerOptimizer[Guard]" = PerOptimizer()


def guard(optimizer: Optimizer) -> "Guard":
    """Returns the guard of an optimizer, which is put in its way the first time."""
    found = _guards.get(optimizer)
    if found is None:
        _guards[optimizer] = found = Guard(optimizer)
    return found


class Guard:
    """Stands in front of `optimizer.step` and looks at the gradients first.

    Args:
        optimizer: The optimizer, which is kept alive no longer than before.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # How many faults of each region the optimizer knows of.
        self._faults: weakref.WeakKeyDictionary[Region, Any] = weakref.WeakKeyDictionary()
        self.kept = False
        self._unseen = 0
        self.optimizer = weakref.ref(optimizer)
        self._own = optimizer.__dict__.get("step")
        self._step = self._own or type(optimizer).step.__get__(weakref.proxy(optimizer))
        self._put = self._method(optimizer)
        optimizer.step = self._put  # type: ignore[method-assign]

    def _method(self, optimizer: Optimizer) -> types.MethodType:
        """Returns what replaces `step`: a method, as schedulers expect, but of no cycle."""

        # The function below the method, because the method would keep the optimizer alive.
        @functools.wraps(getattr(optimizer.step, "__func__", optimizer.step))
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self(args, kwargs)

        return types.MethodType(step, weakref.proxy(optimizer))

    @property
    def regions(self) -> list["Region"]:
        """The regions whose parameters the optimizer trains."""
        return list(self._faults)

    def join(self, region: "Region") -> None:
        """Takes a region's faults into account, from now on."""
        self._faults[region] = faults(region._cells)

    def part(self, region: "Region") -> None:
        """Forgets a region."""
        self._faults.pop(region, None)

    def release(self) -> None:
        """Gives the optimizer its own `step` back, if no region and nobody else needs the guard."""
        optimizer = self.optimizer()
        if self.kept or self._faults or optimizer is None:
            return
        _guards.pop(optimizer)
        if optimizer.__dict__.get("step") is self._put:
            del optimizer.step
            if self._own is not None:
                optimizer.step = self._own  # type: ignore[method-assign]

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Steps the optimizer, unless a gradient is not finite."""
        optimizer = self.optimizer()
        assert optimizer is not None
        # A scaler has looked already: ours says so, PyTorch's hands over what it found.
        looked = is_telling() or hasattr(optimizer, "found_inf")
        if looked or not self._faults:
            return self._step(*args, **kwargs)
        with telling():
            if closure_of(args, kwargs) is not None:
                return self._step_closure(optimizer, args, kwargs)
            return self._step_checked(optimizer, args, kwargs)

    def _step_checked(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        gradients = gradients_of(optimizer)
        if not gradients:
            return self._take(optimizer, args, kwargs)
        found = self._found(gradients)
        kind: Any = type(optimizer)
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if fused and not (found.is_cpu or takes_scaler(kind) or lacks_state(optimizer)):
            return self._step_fused(optimizer, found, args, kwargs)
        if found.item():
            return self._skip(optimizer)
        return self._take(optimizer, args, kwargs)

    def _found(self, gradients: list[Tensor]) -> Tensor:
        """Returns 1.0 where a gradient is not finite, or was not as it left a region, else 0.0."""
        device = gradients[0].device
        found = total([*check(gradients, device).values()], device)
        for region, known in self._faults.items():
            news = faults(region._cells) - known
            found = found + (news.to(device) if isinstance(news, Tensor) else news)
            self._faults[region] = known + news
        # Fused kernels skip at exactly 1.0.
        return found.clamp(max=1.0)

    def _step_fused(self, optimizer: Any, found: Tensor, args: Any, kwargs: Any) -> Any:
        """Lets the kernel of the optimizer skip, so that nobody waits for the device."""
        record = unknown_record(self._facts(), optimizer, found)
        optimizer.found_inf = found
        try:
            result = self._step(*args, **kwargs)
        finally:
            del optimizer.found_inf
        self._note(optimizer, record)
        self._poll(record)
        return result

    def _poll(self, record: StepRecord) -> None:
        """Asks the device now and then, so that a run that stands still does not stay silent."""
        self._unseen += 1
        if self._unseen == _POLLED_EVERY:
            self._unseen = 0
            for region in self.regions:
                region.history.settle()
                if record.skipped:
                    region._refuse_floor(record)

    def _step_closure(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Steps an optimizer that evaluates the loss itself, again where the scale can go lower."""
        evaluation = self._checked(optimizer, closure_of(args, kwargs))
        args, kwargs = with_closure(args, kwargs, evaluation)
        for _ in range(_ATTEMPTS):
            snapshot = Snapshot(optimizer)
            try:
                result = self._step(*args, **kwargs)
            except NonFiniteEvaluationError:
                snapshot.restore()
                if any(region._backs_off() for region in self.regions):
                    continue
                break
            self._note(optimizer, StepRecord(scale=self._scale()))
            return result
        self._skip(optimizer)
        # Else whoever adds to gradients would add to these.
        optimizer.zero_grad()
        return None

    def _checked(self, optimizer: Optimizer, closure: Any) -> Callable[[], Any]:
        """Returns a closure that leaves the step if it finds a gradient that is not finite."""

        def evaluate() -> Any:
            loss = closure()
            gradients = gradients_of(optimizer)
            if gradients and self._found(gradients).item():
                raise NonFiniteEvaluationError
            return loss

        return evaluate

    def _take(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        result = self._step(*args, **kwargs)
        self._note(optimizer, StepRecord(scale=self._scale()))
        return result

    def _skip(self, optimizer: Optimizer) -> None:
        facts = self._facts()
        record = skipped_record(facts, optimizer)
        if not record.nonfinite:
            record = skipped_record(facts, optimizer, CHANGED)
        # What a scheduler looks at: a skipped step is no reason to call its order wrong.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        self._note(optimizer, record)
        for region in self.regions:
            region._refuse_floor(record)

    def _facts(self) -> Facts:
        regions = list(self.regions)
        names = ParameterNames(*filter(None, (region._module() for region in regions)))
        foreign = [region._cells.foreign.clone() for region in regions if region._scaled]
        if not foreign:
            return Facts(names)
        return Facts(names, self._scale(), lambda: any(each.item() for each in foreign), ARRIVED)

    def _scale(self) -> Lazy[float]:
        """Returns the scale of the first region that has one, or what will tell it."""
        for region in self.regions:
            if region._scaled:
                scale = region._cells.scale
                return scale.item() if scale.is_cpu else scale.clone().item
        return 1.0

    def _note(self, optimizer: Optimizer, record: StepRecord) -> None:
        for region in self.regions:
            region._note(optimizer, record)
        if listening():
            emit("step", record=record)
            scales = [region._cells.scale for region in self.regions if region._scaled]
            emit("update", scale=scales[0].clone() if scales else 1.0, scaler=id(optimizer))
