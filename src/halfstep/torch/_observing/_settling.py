"""The step at the scale that a region would have after a few steps."""

import dataclasses

from halfstep.torch._observing._step import Case, Step, run
from halfstep.torch._regions._forward import forward_of

# How a region backs off while its scale is not a proven one, and how often that is tried.
_BACKOFF, _TIMES = 16.0, 8


def settled(case: Case) -> tuple[Case, Step]:
    """Returns the step at the scale to which regions back off, if that makes it finite.

    A dynamic scale begins so high that the first steps overflow, which is no fault.
    """
    step = first = run(case)
    if not _backs_off(case):
        return case, step
    lower = case
    for _ in range(_TIMES):
        if not step.loss_finite or not _overflows(step):
            return lower, step
        lower = dataclasses.replace(lower, factor=lower.factor / _BACKOFF)
        step = run(lower)
    return case, first


def _overflows(step: Step) -> bool:
    """Returns whether something on the way back did, also where the gradients do not show it."""
    made = (each for each in step.made if each.key.phase == "backward")
    return not step.gradients_finite or any(each.low for each in made)


def _backs_off(case: Case) -> bool:
    found = (forward_of(each) for each in case.model.modules())
    return any(each.region.policy.scale.kind == "dynamic" for each in found if each)
