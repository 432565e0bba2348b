"""What a region does about overflows that no scale cures: it finds their operation, and widens it.

Which operation it was shows only where a step is gone through once more. So once steps are skipped
on and on, the calls of a step are kept, and made again when that step is skipped, too.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from halfstep.core import (
    Fault,
    Policy,
    Rule,
    Rules,
    SkippedStepsWarning,
    emit,
    levels_to_user,
    listening,
    where_from,
)
from halfstep.torch._private import never_compile
from halfstep.torch._regions._repeated import Repeated
from halfstep.torch._scaling._steps import StepRecord

if TYPE_CHECKING:
    from halfstep.torch._region import Region

# Finds the fault of calls of a model, at so many times its scale, and the rules that leave none.
Search = Callable[[nn.Module, list[Repeated], float], tuple[Fault, tuple[Rule, ...]] | None]

# Where gradients as large as those of a plain loss overflow, smaller ones vanish already.
_LOW = 1.0
_PATIENCE = 2
_MOST_CALLS = 16


class WidenedRegionWarning(UserWarning):
    """A region runs an operation in float32 from now on, because it overflowed on and on."""


class Skipping:
    """Leaves it at skipping steps."""

    def keep(self, args: Any, kwargs: Any) -> Repeated | None:
        """Returns what a call is kept as, None where nothing is to be found out about it."""
        return None

    def step(self, region: "Region", record: StepRecord) -> None:
        """Takes notice of what a step did."""

    def waits(self) -> bool:
        """Returns whether there is something to be tried before a region gives up."""
        return False

    def again(self) -> "Skipping":
        """Returns one for a copy of the region."""
        return self


class Widening(Skipping):
    """Lets operations run in float32 that overflow on and on.

    Args:
        search: Finds the rules for that.
    """

    def __init__(self, search: Search) -> None:
        self._search = search
        # Steps in a row that were skipped for no fault of the scale.
        self._row = 0
        self._calls: list[Repeated] = []
        # The scale before such a row, None for the first one.
        self._scale: float | None = None
        self._told = False

    def keep(self, args: Any, kwargs: Any) -> Repeated | None:
        """Returns what a call is kept as, None where nothing is to be found out about it."""
        if not self._looks() or len(self._calls) == _MOST_CALLS:
            return None
        self._calls.append(Repeated(args, kwargs))
        return self._calls[-1]

    def _looks(self) -> bool:
        ready = self._row >= _PATIENCE and torch.is_grad_enabled()
        return ready and not torch.compiler.is_compiling()

    def step(self, region: "Region", record: StepRecord) -> None:
        """Takes notice of what a step did, and looks into one that was skipped."""
        calls, self._calls = self._calls, []
        if not record.skipped:
            self._row, self._scale = 0, record.scale
        elif record.loss_nonfinite or region.scale <= _low(region):
            self._row = 0 if calls else self._row + 1
            self._look(region, calls)

    def _look(self, region: "Region", calls: list[Repeated]) -> None:
        module = region._module()
        factor = max(1.0, _low(region) / region.scale)
        if module is None or not calls:
            return
        fault, rules = self._search(module, calls, factor) or (None, ())
        if fault is not None and rules:
            region._follow((*region.widened, *rules))
            # What was compiled has the rules that there were.
            module.__dict__["forward"].compile_anew()
            region._restart(self._scale or region.policy.scale.init_scale)
            _tell(region, fault, rules)
        elif not self._told:
            self._told = True
            _tell_in_vain(region, fault)

    def waits(self) -> bool:
        """Returns whether there is something to be tried before a region gives up."""
        return 0 < self._row <= _PATIENCE

    def again(self) -> "Widening":
        """Returns one for a copy of the region."""
        return Widening(self._search)


def _low(region: "Region") -> float:
    rule = region.policy.scale
    return max(_LOW, rule.min_scale) if rule.kind == "dynamic" else rule.init_scale


def _tell(region: "Region", fault: Fault, rules: tuple[Rule, ...]) -> None:
    if listening():
        emit("widened", rules=rules)
    rows = " and ".join(f"{each.target} in {each.where or 'all modules'}" for each in rules)
    text = (
        f"{region!r} runs {rows} in float32 from now on, because steps overflowed on and on. "
        f"{str(fault).splitlines()[0]}. To begin with that, write policy={str(region.policy)!r}."
    )
    warnings.warn(WidenedRegionWarning(text), stacklevel=levels_to_user())


def _tell_in_vain(region: "Region", fault: Fault | None) -> None:
    nothing = "its calls, made again, show no inf or NaN that begins in it"
    why = nothing if fault is None else str(fault).splitlines()[0]
    text = (
        f"{region!r} skips steps on and on, and on_overflow='widen' has found no rule that cures "
        f"it: {why}. {where_from('torch')}"
    )
    warnings.warn(SkippedStepsWarning(text), stacklevel=levels_to_user())


def with_rules(policy: Policy, rules: tuple[Rule, ...]) -> Policy:
    """Returns a policy with some rules on top of its own."""
    return dataclasses.replace(policy, rules=functools.reduce(_with_rule, rules, policy.rules))


def _with_rule(rules: Rules, rule: Rule) -> Rules:
    return rules.with_rule(**rule.to_dict())


# They run around what is compiled; as frames of their own they are noise.
for _function in (Skipping.keep, Widening.keep):
    never_compile(_function)
