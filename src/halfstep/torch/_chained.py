"""Which of the models that a step calls, one on what another returned, is the one at fault."""

from dataclasses import replace

from halfstep.core import Diagnosis, written
from halfstep.torch._called import Call, loss_of
from halfstep.torch._observing._diagnosis import diagnosis
from halfstep.torch._observing._sizes import is_finite
from halfstep.torch._observing._step import Case
from halfstep.torch._observing._ways import Way
from halfstep.torch._regions._forward import forward_of
from halfstep.torch._several import is_given
from halfstep.torch._tried import tried

_BACKS_OFF = (
    "a region skips such a step and lowers its scale by itself: it is a fault only if that goes on"
)


def fault_of(calls: list[Call], scale: float) -> Diagnosis:
    """Returns what went wrong in the calls of a model, and not before them.

    Args:
        calls: Its calls in a step.
        scale: What the gradients that came back were multiplied by.
    """
    found = Diagnosis()
    for some in _first_sound(calls):
        found = found or _seen(_case(some, scale))
    if not found and found.loss_scale and _broke(calls):
        found = _searching(calls, scale, found.loss_scale)
    given = found.first is not None and is_given(found.first)
    # What was computed for it was made between the models.
    return Diagnosis() if given and any(map(_is_given_computed, calls)) else found


def _broke(calls: list[Call]) -> bool:
    """Returns whether gradients that were finite became others within the calls."""
    if any(call.entered_broken for call in calls):
        return False
    own = [each.grad for each in calls[0].model.parameters() if each.grad is not None]
    return any(call.broke for call in calls) or not all(bool(is_finite(it)) for it in own)


def _first_sound(calls: list[Call]) -> list[list[Call]]:
    """Returns the calls with numbers, and all of them, which may hide what happened in those."""
    sound = [call for call in calls if call.is_given_sound]
    return [sound, calls] if 0 < len(sound) < len(calls) else [calls]


def _case(calls: list[Call], scale: float) -> Case:
    return Case(calls[0].model, (), loss_of(calls, scale), scale, tells_loss=False)


def _seen(case: Case) -> Diagnosis:
    with tried(case, None):
        return diagnosis(case)


def _searching(calls: list[Call], scale: float, fits: float) -> Diagnosis:
    """Returns what overflowed at the scale that a region had in the step, and has backed off from.

    Args:
        calls: The calls of a model.
        scale: What the gradients that came back were multiplied by.
        fits: The scale at which nothing overflows.
    """
    forward, before = forward_of(calls[0].model), calls[-1].region_scale
    if forward is None or before is None:
        return Diagnosis()
    case = replace(_case(calls, scale), settles=False)
    found = _seen(case.scaled([forward.region], float(before) / forward.region.scale))
    lower = Way(forward.region).at_scale(fits)
    changes = (lower,) if lower else ()
    told = (replace(each, changes=changes, remedy=written(changes)) for each in found.faults[:1])
    faults = (replace(each, note=_BACKS_OFF) for each in told)
    return replace(found, faults=(*faults, *found.faults[1:]))


def _is_given_computed(call: Call) -> bool:
    return not call.is_given_sound and call.has_history
