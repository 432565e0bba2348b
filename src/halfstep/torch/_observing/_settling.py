"""The step at the scale that a region would have after a few steps."""

import dataclasses

from halfstep.torch._observing._step import Case, Step, run
from halfstep.torch._regions._forward import forward_of

# How a region backs off while its scale is not a proven one, and how often that is tried.
_BACKOFF, _TIMES = 16.0, 8
# By what it then grows, as far as it can.
_GROWTHS = (4.0, 2.0)


def settled(case: Case) -> tuple[Case, Step]:
    """Returns the step at the scale to which regions back off, if that makes it finite.

    A dynamic scale begins so high that the first steps overflow, which is no fault.
    """
    lower, step = case, run(case)
    first = step
    if not backs_off(case) or not step.loss_finite or not _overflows(step):
        return case, step
    for _ in range(_TIMES):
        lower, step = _at(lower, 1 / _BACKOFF)
        if not _overflows(step):
            return _raised(lower, step)
    return case, first


def _raised(case: Case, step: Step) -> tuple[Case, Step]:
    """Returns the step at the largest scale that it allows, which a region grows back to."""
    for by in _GROWTHS:
        higher, tried = _at(case, by)
        if not _overflows(tried):
            case, step = higher, tried
    return case, step


def _at(case: Case, by: float) -> tuple[Case, Step]:
    scaled = dataclasses.replace(case, factor=case.factor * by)
    return scaled, run(scaled)


def _overflows(step: Step) -> bool:
    """Returns whether something on the way back did, also where the gradients do not show it.

    Where NaN is first, as of zero times inf, no scale helps.
    """
    backward = (each for each in step.made if each.key.phase == "backward" and each.fresh)
    first = next((each.made for each in backward), None)
    return first is not None and first.held is not None and not first.held.has_nan


def backs_off(case: Case) -> bool:
    """Returns whether a step has a scale that may back off."""
    if not case.settles:
        return False
    found = (forward_of(each) for each in case.model.modules())
    return any(each.region.policy.scale.kind == "dynamic" for each in found if each)
