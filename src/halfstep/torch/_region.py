"""A region: a model inside which gradients are scaled and outside of which they are true."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.core import Policy, Rule, ScaleState
from halfstep.errors import NonFiniteError, UsageError
from halfstep.torch._autocast import settings_by_device
from halfstep.torch._dtypes import compute_dtype
from halfstep.torch._lost import LostUpdates, counted
from halfstep.torch._master import attach_masters, make_half, refuse_fed
from halfstep.torch._masters._convert import Halved, flatten, splittable
from halfstep.torch._masters._kept import kept_tensors
from halfstep.torch._masters._saving import adopt, save_with_state
from halfstep.torch._masters._settings import MasterSettings
from halfstep.torch._private import SEES_ATTRIBUTES
from halfstep.torch._regions import _checkpoint
from halfstep.torch._regions._attach import (
    checked_optimizers,
)
from halfstep.torch._regions._clip import Clipping
from halfstep.torch._regions._forward import (
    forward_of,
    own_parameters,
)
from halfstep.torch._regions._graph import Capture
from halfstep.torch._regions._guard import guard
from halfstep.torch._regions._release import Release, refuse_unreleasable
from halfstep.torch._regions._release import release as release_of
from halfstep.torch._regions._state import Cells, fresh, overflowed, settled
from halfstep.torch._regions._strays import Leaves
from halfstep.torch._regions._unused import warn_of_no_use
from halfstep.torch._regions._widening import Skipping, with_rules
from halfstep.torch._scaling._gradients import ParameterNames
from halfstep.torch._scaling._steps import NOT_YET, History, StepRecord, advice

_OVERFLOW = "gradients were not finite"


class Region(Clipping):
    """A model inside which operations run in low precision; `prepare` returns it.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2)
        >>> region = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> region.scale, region.history.steps
        (65536.0, 0)
        >>> region.remove()
    """

    def __init__(self, module: nn.Module, policy: Policy, cells: Cells, handler: Skipping) -> None:
        self._asked, self._handler = policy, handler
        self._follow(())
        self._output_dtype = compute_dtype(policy.output_dtype)
        self._scaled = policy.scale.kind != "none"
        self._rule = str(policy.scale)
        self._cells = cells
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)
        self._history = History()
        self._last_step = StepRecord(skipped=True, reason=NOT_YET)
        self._optimizers: list[Callable[[], Optimizer | None]] = []
        self._known_scale = policy.scale.init_scale
        self._calls = 0
        self._used = False
        # How masters are kept, None where parameters stay in float32, and of which parameters.
        self._masters: MasterSettings | None = None
        self._halved = Halved()
        self._releases: list[Release] | None = None
        # Whether a global policy made it.
        self._automatic = False
        self._leaves = Leaves()
        # Hooks on modules inside whose findings the forward itself reads.
        self._own_hooks: set[int] = set()
        self._on_misfit: Callable[[UsageError], None] = _raise
        self._on_copy: Callable[[Region], None] = _leave
        self._capture = Capture(broken=self._scaled and not SEES_ATTRIBUTES)

    @property
    def policy(self) -> Policy:
        """The policy of the region, with the rules in `widened`."""
        return self._policy

    @property
    def widened(self) -> tuple[Rule, ...]:
        """The rules that came of overflows with `on_overflow="widen"`, in order."""
        return self._widened

    def _follow(self, widened: tuple[Rule, ...]) -> None:
        """Runs by the policy that was asked for, with some rules on top."""
        self._widened = widened
        self._policy = policy = with_rules(self._asked, widened)
        self._settings = settings_by_device(policy)
        # Whether it matters in which module an operation runs.
        self._located = any(edit.where for edit in policy.rules.edits)

    @property
    def scale(self) -> float:
        """What the sum of the magnitudes of the gradients that enter is brought to.

        1.0 where the policy scales nothing. Reading it waits for an accelerator.
        """
        return settled(self._cells, self._policy.scale).scale

    @property
    def last_step(self) -> StepRecord:
        """What the latest `step` of an attached optimizer did."""
        return self._last_step

    @property
    def history(self) -> History:
        """How many steps were taken and skipped, and how the scale changed and why."""
        self._note_scale()
        return self._history

    def attach(self, optimizer: Optimizer | Iterable[Optimizer]) -> None:
        """Makes an optimizer skip steps from gradients that are not finite.

        Args:
            optimizer: One or several optimizers that train parameters of the model.
        """
        module = self._module()
        if module is None:
            raise UsageError("attach() needs the model of the region, which is gone. Prepare anew.")
        found = checked_optimizers(optimizer, module)
        for each in found if self._releases is not None else ():
            refuse_unreleasable(each, own_parameters(module))
        for each in found:
            self._feed(each)
            guard(each).join(self)
            self._optimizers.append(weakref.ref(each))
            if self._releases is not None:
                self._releases += release_of(self, each, own_parameters(module))

    def _feed(self, optimizer: Optimizer) -> None:
        """Lets an optimizer see masters, or parameters with all bits that it was saved with."""
        if self._masters is None:
            adopt(optimizer)
            save_with_state(optimizer)
            return
        if not any(region._masters for region in guard(optimizer).regions):
            refuse_fed("prepare", optimizer)
        attach_masters(optimizer, self._masters)

    def lost_updates(self) -> contextlib.AbstractContextManager[LostUpdates]:
        """Counts the updates that round to nothing, as `halfstep.torch.lost_updates` does.

        Example:
            >>> import torch
            >>> from halfstep.torch import prepare
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
            >>> region = prepare(model, optimizer, "mixed_bfloat16", masters="split")
            >>> with region.lost_updates() as lost:
            ...     model(torch.ones(1, 2)).sum().backward()
            ...     optimizer.step()
            >>> lost.fractions
            {'weight': 1.0}
        """
        return counted(list(self._attached()), ParameterNames(self._module()))

    @property
    def releases(self) -> bool:
        """Whether gradients are applied and freed within backward."""
        return bool(self._releases)

    def _has_released(self) -> bool:
        """Returns whether gradients are released, and none was left to a step."""
        return self.releases and not any(each.is_left() for each in self._releases or ())

    def _restart(self, scale: float) -> None:
        """Goes on at a scale that is as good as new."""
        begun = fresh(ScaleState(scale), self._cells.scale.device)
        # How often there were faults goes on, for the optimizers that have counted them.
        for cell, value in zip(self._cells[:-1], begun, strict=False):
            cell.copy_(value)
        self._history.changed(self._known_scale, scale, "an operation was widened")
        self._known_scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the scale for a checkpoint, as plain numbers, and rules."""
        return _checkpoint.saved(self._cells) | _checkpoint.saved_rules(self._widened)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads what `state_dict` returned, or the state dict of a GradScaler.

        Args:
            state_dict: The state.
        """
        before = self.scale
        widened = _checkpoint.rules_in(state_dict)
        _checkpoint.load(self._cells, state_dict)
        self._follow(widened)
        for optimizer in self._attached():
            guard(optimizer).join(self)
        self._known_scale = self.scale
        self._history.changed(before, self._known_scale, "load_state_dict()")

    def remove(self) -> None:
        """Makes the model and its optimizers what they were before `prepare`.

        Parameters that were made half-precision ones are float32 again, with all of their bits;
        those that were in half precision before lose what only their masters have.
        """
        module = self._module()
        forward = None if module is None else forward_of(module)
        if module is not None and forward is not None and forward.region is self:
            del module.forward
            if forward.original is not None:
                module.forward = forward.original
        for release in self._releases or ():
            release.remove()
        found = [(guard(optimizer), optimizer) for optimizer in self._attached()]
        self._halved.undo([optimizer for _, optimizer in found])
        self._optimizers.clear()
        for each, _ in found:
            each.part(self)
            each.release()
        for each, optimizer in found:
            each.clips.forget(optimizer)
            if self._masters is not None and not kept_tensors(optimizer):
                each.feeds(None)

    def __repr__(self) -> str:
        module = self._module()
        name = "a model that is gone" if module is None else type(module).__name__
        return f"Region({name}, policy={str(self._policy)!r})"

    def _keep_masters(self, modules: list[nn.Module], settings: MasterSettings) -> None:
        self._masters = settings
        parameters = splittable(modules)
        self._halved = make_half(parameters, settings)
        flatten(modules)

    def _copied(self, module: nn.Module, copies: Mapping[int, Any]) -> "Region":
        """Returns a region of a copy of the module, with the same state and no optimizer."""
        cells = Cells(*[cell.clone() for cell in self._cells])
        again = Region(module, self._asked, cells, self._handler.again())
        again._follow(self._widened)
        again._masters = self._masters
        again._halved = self._halved.of_copies(copies)
        again._releases = None if self._releases is None else []
        self._on_copy(again)
        return again

    def _cells_for(self, tensors: list[Tensor]) -> Cells:
        """Returns the state, on the device of the tensors."""
        if tensors and self._cells.scale.device != tensors[0].device:
            self._cells = Cells(*[cell.to(tensors[0].device) for cell in self._cells])
        return self._cells

    def _backs_off(self) -> bool:
        """Returns whether the next pass runs at a lower scale; reads the device."""
        return self._scaled and self.scale < self._cells.scale.item()

    def _note(self, optimizer: Optimizer, record: StepRecord) -> None:
        if not self._used:
            warn_of_no_use(self)
        self._last_step = record
        if self._cells.scale.is_cpu or (record.known and record.skipped):
            self._note_scale(record)
            self._handler.step(self, record)
        self._history.add(optimizer, record)

    def _note_scale(self, record: StepRecord | None = None) -> None:
        scale = self.scale if self._scaled else self._known_scale
        if scale < self._known_scale:
            own = record is not None and record.skipped and not record.loss_nonfinite
            reason = record.reason if record and own else _OVERFLOW
        else:
            reason = f"{self._policy.scale.growth_interval} passes in a row were finite"
        self._history.changed(self._known_scale, scale, reason)
        self._known_scale = scale

    def _refuse_floor(self, record: StepRecord) -> None:
        """Raises an error if gradients overflow although the scale cannot go any lower."""
        if not (self._scaled and overflowed(self._cells)) or self._handler.waits():
            return
        rule = self._policy.scale
        if rule.at_floor(ScaleState(self.scale)) and not self._backs_off():
            raise NonFiniteError(
                f"The region needs finite gradients at its smallest scale, but {record.reason} at "
                f"{rule.min_scale:g}, and min_scale lets it go no lower. {advice(record)}"
            )


def _raise(error: UsageError) -> None:
    raise error


def _leave(_copy: Region) -> None:
    """Lets a copy be what it is."""
