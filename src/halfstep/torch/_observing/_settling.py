"""The step at the scale that a region would have after a few steps."""

import math
from typing import TYPE_CHECKING

from halfstep.torch._observing._step import Case, Step, run
from halfstep.torch._regions._forward import forward_of

if TYPE_CHECKING:
    from halfstep.torch._region import Region

# How a region backs off while its scale is not a proven one.
_BACKOFF = 16.0
# By what it then grows, as far as it can.
_GROWTHS = (4.0, 2.0)


def settled(case: Case) -> tuple[Case, Step]:
    """Returns the step at the scale to which regions back off, if that makes it finite.

    A dynamic scale begins so high that the first steps overflow, which is no fault.
    """
    lower, step = case, run(case)
    first, regions = step, dynamic(step) if case.settles else []
    if not regions or not step.loss_finite or not _overflows(step):
        return case, step
    for _ in range(_times(case, regions)):
        lower, step = _at(lower, regions, 1 / _BACKOFF)
        if not _overflows(step):
            return _raised(lower, regions, step)
    return case, first


def _raised(case: Case, regions: list["Region"], step: Step) -> tuple[Case, Step]:
    """Returns the step at the largest scale that it allows, which a region grows back to."""
    for by in _GROWTHS:
        higher, tried = _at(case, regions, by)
        if not _overflows(tried):
            case, step = higher, tried
    return case, step


def _at(case: Case, regions: list["Region"], by: float) -> tuple[Case, Step]:
    scaled = case.scaled(regions, by)
    return scaled, run(scaled)


def _overflows(step: Step) -> bool:
    """Returns whether something on the way back did, so that a region would skip the step.

    Where NaN is first, as of zero times inf, no scale helps.
    """
    if step.gradients_finite:
        return False
    backward = (each for each in step.made if each.key.phase == "backward" and each.fresh)
    first = next((each.made for each in backward), None)
    return first is not None and first.held is not None and not first.held.has_nan


def backs_off(case: Case) -> bool:
    """Returns whether a model has a scale that may back off."""
    forwards = filter(None, map(forward_of, case.model.modules()))
    return any(each.region.policy.scale.kind == "dynamic" for each in forwards)


def dynamic(step: Step) -> list["Region"]:
    """Returns the regions of a step whose scale may back off."""
    return [each for each in step.regions if each.policy.scale.kind == "dynamic"]


def _times(case: Case, regions: list["Region"]) -> int:
    """Returns how often the regions can back off before one gives up."""
    scales = ((case.scale_of(each), each.policy.scale.min_scale) for each in regions)
    return math.floor(min(math.log(scale / lowest, _BACKOFF) for scale, lowest in scales))
