"""The step at the scale that a region would have after a few steps."""

import math
from collections.abc import Callable
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
    step = run(case)
    regions = dynamic(step) if case.settles else []
    if not regions or not step.loss_finite or step.gradients_finite:
        return case, step
    fits = _fitting(case, regions)
    lower, tried = case, step
    for _ in range(0 if fits(step) else _times(case, regions)):
        lower, tried = _at(lower, regions, 1 / _BACKOFF)
        if fits(tried):
            return _raised(lower, regions, tried, fits)
    return case, step


def _fitting(case: Case, regions: list["Region"]) -> Callable[[Step], bool]:
    """Returns what to back off for: finite gradients, or at least none that overflow."""
    lowest = _at(case, regions, _BACKOFF ** -_times(case, regions))[1]
    if lowest.gradients_finite:
        return lambda step: step.gradients_finite
    return lambda step: not _overflows(step)


def _raised(
    case: Case, regions: list["Region"], step: Step, fits: Callable[[Step], bool]
) -> tuple[Case, Step]:
    """Returns the step at the largest scale that it allows, which a region grows back to."""
    for by in _GROWTHS:
        higher, tried = _at(case, regions, by)
        if fits(tried):
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
    return max(0, math.floor(min(math.log(scale / low, _BACKOFF) for scale, low in scales)))
