"""An optimizer that takes no step from gradients that are not finite."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.core import emit, listening
from halfstep.torch._masters._feeding import Feeding
from halfstep.torch._masters._kept import kept_tensors
from halfstep.torch._regions._facts import facts_of, scale_of
from halfstep.torch._regions._front import Front, showing_only
from halfstep.torch._regions._known import Clips
from halfstep.torch._regions._state import faults
from halfstep.torch._regions._turns import Turns
from halfstep.torch._scaling._closure import (
    NonFiniteEvaluationError,
    Snapshot,
    closure_of,
    with_closure,
)
from halfstep.torch._scaling._gradients import check, gradients_of
from halfstep.torch._scaling._iteration import total
from halfstep.torch._scaling._optimizers import divides, lacks_state
from halfstep.torch._scaling._records import skipped_record, unknown_record
from halfstep.torch._scaling._released import Findings
from halfstep.torch._scaling._steps import History, StepRecord
from halfstep.torch._telling import is_telling, telling

if TYPE_CHECKING:
    from halfstep.torch._region import Region

CHANGED = "a gradient overflowed inside the model, and was made finite since"
EARLIER = "a gradient that backward had reached before was not finite"
# How often a closure is evaluated again, at half the scale each time.
_ATTEMPTS = 32
_POLLED_EVERY = 64

# Held by the optimizers, so that a guard goes with its own. By number: some have no hash.
_guards: "weakref.WeakValueDictionary[int, Guard]" = weakref.WeakValueDictionary()


def guard(optimizer: Optimizer) -> "Guard":
    """Returns the guard of an optimizer, which is put in its way the first time."""
    found = _guards.get(id(optimizer))
    # Another optimizer may have had this number before.
    if found is None or found.optimizer() is not optimizer:
        _guards[id(optimizer)] = found = Guard(optimizer)
    return found


class Guard:
    """Stands in front of `optimizer.step` and looks at the gradients first.

    It also stands in front of `optimizer.zero_grad`: what happened to gradients that are gone is no
    reason to skip a step. `model.zero_grad()` it does not see.

    Args:
        optimizer: The optimizer, which is kept alive no longer than before.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # How many faults of each region the optimizer knows of.
        self._faults: weakref.WeakKeyDictionary[Region, Any] = weakref.WeakKeyDictionary()
        # Whoever wants the guard without a region, asked before each step for regions to join.
        self.keeper: Callable[[Guard, Optimizer], None] | None = None
        # Whether steps are looked at that no region has a part in.
        self.is_strict = True
        # How the optimizer is fed with masters, None for not at all.
        self._feeding: Feeding | None = None
        # Whether backward leaves gradients that it could apply, and whose it is applying.
        self.accumulating = False
        self._part: Region | None = None
        # What was found up to now, within backward where gradients are released.
        self._findings = Findings()
        self.turns = Turns()
        # Of steps that no region tells about.
        self._history = History()
        self._unseen = 0
        self.clips = Clips()
        self.optimizer = weakref.ref(optimizer)
        calls = {"step": self._guard_step, "zero_grad": self._guard_zero_grad}
        self._fronts = {name: Front(optimizer, name, call) for name, call in calls.items()}

    @property
    def regions(self) -> list["Region"]:
        """The regions whose parameters the optimizer trains, or steps at the moment."""
        return list(self._faults) if self._part is None else [self._part]

    def join(self, region: "Region") -> None:
        """Takes a region's faults into account, from now on."""
        self._faults[region] = faults(region._cells)

    def part(self, region: "Region") -> None:
        """Forgets a region."""
        self._faults.pop(region, None)

    def feeds(self, feeding: Feeding | None) -> None:
        """Feeds the optimizer with masters from now on, or no longer."""
        optimizer = self.optimizer()
        if optimizer is not None and feeding is not None:
            feeding.begin(optimizer)
        elif optimizer is not None and self._feeding is not None:
            self._feeding.end(optimizer)
        self._feeding = feeding
        self.release()

    def release(self) -> None:
        """Gives the optimizer its own `step` back, if no region and nobody else needs the guard."""
        optimizer = self.optimizer()
        if self.keeper or self._faults or self._feeding or optimizer is None:
            return
        _guards.pop(id(optimizer), None)
        for front in self._fronts.values():
            front.remove(optimizer)

    def _guard_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Steps the optimizer, unless a gradient is not finite."""
        optimizer = self._alive("step")
        # A scaler has looked already: ours says so, PyTorch's hands over what it found.
        looked = is_telling() or hasattr(optimizer, "found_inf")
        try:
            is_kept = self.keeper is not None and self.is_strict
            if looked or not (self._faults or is_kept or self._feeding):
                self.clips.forget(optimizer)
                return self._run("step", optimizer, args, kwargs)
            with telling():
                if closure_of(args, kwargs) is not None:
                    return self._step_closure(optimizer, args, kwargs)
                return self._step_checked(optimizer, args, kwargs)
        finally:
            self._findings = Findings()
            self.turns.step()

    def step_part(self, region: "Region", parameters: list[Tensor], findings: Findings) -> None:
        """Steps some of the parameters, of a region that alone tells about it."""
        optimizer = self.optimizer()
        if optimizer is None:
            return
        self._part, self._findings = region, findings
        try:
            with showing_only(optimizer, parameters), telling():
                self._step_checked(optimizer, (), {})
        finally:
            self._part = None

    def _guard_zero_grad(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Clears the gradients, and forgets what happened to them."""
        optimizer = self._alive("zero_grad")
        self.turns.clear()
        self.clips.drop()
        self._findings = Findings()
        for region in self.regions:
            self.join(region)
        return self._run("zero_grad", optimizer, args, kwargs)

    def _alive(self, name: str) -> Optimizer:
        """Returns the optimizer, after its keeper has looked for regions that are new to it."""
        optimizer = self.optimizer()
        if optimizer is None:
            raise ReferenceError(
                f"{name}() needs its optimizer, which is gone. Keep the optimizer, not only its "
                f"{name}."
            )
        if self.keeper is not None:
            self.keeper(self, optimizer)
        return optimizer

    def _run(self, name: str, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Calls what the optimizer has behind the guard."""
        own = self._fronts[name].own
        if name == "step" and self._feeding is not None:
            return self._feeding.step(optimizer, own, args, kwargs)
        if own is not None:
            return own(*args, **kwargs)
        return getattr(type(optimizer), name)(optimizer, *args, **kwargs)

    def _step_checked(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        gradients = gradients_of(optimizer)
        if not gradients or gradients[0].is_meta:
            self.clips.drop()
            return self._take(optimizer, args, kwargs)
        with self.clips.step(optimizer, gradients) as known:
            return self._step_known(optimizer, self._found(gradients, known), args, kwargs)

    def _step_known(self, optimizer: Optimizer, found: Tensor, args: Any, kwargs: Any) -> Any:
        """Steps the optimizer where nothing was found, which an accelerator may have to tell."""
        waits = found.is_cpu or any(region._handler.waits() for region in self.regions)
        if divides(optimizer) and not (waits or lacks_state(optimizer)):
            return self._step_fused(optimizer, found, args, kwargs)
        if found.item():
            return self._skip(optimizer)
        return self._take(optimizer, args, kwargs)

    def _found(self, gradients: list[Tensor], found: Tensor | None = None) -> Tensor:
        """Returns 1.0 where a gradient is not finite, or was not as it left a region, else 0.0."""
        device = gradients[0].device
        if found is None:
            found = total([*check(gradients, device).values()], device)
        for region in self.regions:
            known = self._faults[region]
            news = faults(region._cells) - known
            found = found + (news.to(device) if isinstance(news, Tensor) else news)
            self._faults[region] = known + news
        # Fused kernels skip at exactly 1.0.
        return self._findings.add(found).clamp(max=1.0)

    def _step_fused(self, optimizer: Any, found: Tensor, args: Any, kwargs: Any) -> Any:
        """Lets the kernel of the optimizer skip, so that nobody waits for the device."""
        record = unknown_record(facts_of(self.regions, self.clips.norm), optimizer, found)
        optimizer.found_inf = found
        try:
            result = self._run("step", optimizer, args, kwargs)
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
            self._history.settle()
            for region in self.regions:
                region.history.settle()
                region._handler.step(region, record)
                if record.skipped:
                    region._refuse_floor(record)

    def _step_closure(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Steps an optimizer that evaluates the loss itself, again where the scale can go lower."""
        evaluation = self._checked(optimizer, closure_of(args, kwargs))
        args, kwargs = with_closure(args, kwargs, evaluation)
        for _ in range(_ATTEMPTS):
            snapshot = Snapshot(optimizer, kept_tensors(optimizer))
            try:
                result = self._run("step", optimizer, args, kwargs)
            except NonFiniteEvaluationError:
                snapshot.restore()
                if any(region._backs_off() for region in self.regions):
                    continue
                break
            self._note(optimizer, StepRecord(scale=scale_of(self.regions)))
            return result
        self._skip(optimizer)
        # Else whoever adds to gradients would add to these.
        optimizer.zero_grad()
        return None

    def _checked(self, optimizer: Optimizer, closure: Any) -> Callable[[], Any]:
        """Returns a closure that leaves the step if it finds a gradient that is not finite."""

        def evaluate() -> Any:
            self._findings = Findings()
            loss = closure()
            gradients = gradients_of(optimizer)
            # What is left of the step is the optimizer's own, which knows nothing of clipping.
            self.clips.forget(optimizer)
            if gradients and self._found(gradients).item():
                raise NonFiniteEvaluationError
            return loss

        return evaluate

    def _take(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        result = self._run("step", optimizer, args, kwargs)
        self._note(optimizer, StepRecord(scale=scale_of(self.regions), grad_norm=self.clips.norm))
        return result

    def _skip(self, optimizer: Optimizer) -> None:
        facts = facts_of(self.regions, self.clips.norm)
        record = skipped_record(facts, optimizer)
        if not record.nonfinite:
            reason = EARLIER if self._findings.were_bad() else CHANGED
            record = skipped_record(facts, optimizer, reason)
        # What a scheduler looks at: a skipped step is no reason to call its order wrong.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        self._note(optimizer, record)
        for region in self.regions:
            region._refuse_floor(record)

    def _note(self, optimizer: Optimizer, record: StepRecord) -> None:
        for region in self.regions:
            # One that has released its gradients has told about them within backward.
            if self._part is not None or not region._has_released():
                region._note(optimizer, record)
        if not self._faults:
            self._history.add(optimizer, record)
        if listening() and self._part is None:
            emit("step", record=record)
            scales = [region._cells.scale for region in self.regions if region._scaled]
            emit("update", scale=scales[0].clone() if scales else 1.0, scaler=id(optimizer))
