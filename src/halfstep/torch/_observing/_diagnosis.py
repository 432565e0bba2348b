"""From what was seen in a step to what is told of it."""

import dataclasses
from collections.abc import Iterator

import torch

from halfstep.core import Change, Diagnosis, Fault, Rule, written
from halfstep.torch._observing._formats import Formats
from halfstep.torch._observing._losses import refuse_unused, refuse_without_gradient
from halfstep.torch._observing._notes import note_of
from halfstep.torch._observing._ran import Ran, Value
from halfstep.torch._observing._remedy import Remedies, attempted, way_of
from halfstep.torch._observing._settling import settled
from halfstep.torch._observing._step import Case, Step, run
from halfstep.torch._observing._trial import Kinds
from halfstep.torch._observing._verdict import faults, is_in_float32, underflows
from halfstep.torch._observing._ways import Way
from halfstep.torch._regions._forward import forward_of


def diagnosis(case: Case) -> Diagnosis:
    """Returns the faults of a step, each with what to write."""
    case, step = settled(case)
    refuse_unused(case.caller, case.model, step.called)
    wide = in_float32(case)
    found = faults(step, wide)
    if not found and not step.has_gradient:
        refuse_without_gradient(case.caller, case.model)
    lost = next(underflows(step, wide), None) if not found else None
    remedies = Remedies(case, step, wide, _way(step, found[0] if found else lost and lost[0]))
    told = _told_faults(found, remedies) if lost is None else [_told_underflow(*lost, remedies)]
    return Diagnosis(tuple(told), remedies.scale)


def _way(step: Step, ran: Ran | None) -> Way:
    """Returns how an operation computes in low precision, or without one the step."""
    if ran is not None:
        return way_of(ran, step)
    ways = [each.way for each in step.ran if each.way is not None]
    return next((each for each in ways if each.region is not None), (*ways, Way())[0])


def widening(case: Case) -> tuple[Fault, tuple[Rule, ...]] | None:
    """Returns the first fault of calls of a region and the rules that leave none, if some do.

    Returns:
        The fault, and no rules where none help; None where there is no fault.
    """
    step = run(case)
    wide = in_float32(case)
    for each in faults(step, wide):
        edits = Remedies(case, step, wide, way_of(each, step)).edits(each)
        forward = forward_of(case.model)
        own = forward is not None and all(way.region is forward.region for way, _ in edits)
        fault = _fault(each, _kinds([each], case))
        return fault, tuple(rule for _, rule in edits) if own else ()
    return None


def _told_faults(found: list[Ran], remedies: Remedies) -> Iterator[Fault]:
    kinds = _kinds(found, remedies.case)
    for each in found:
        wide = is_in_float32(each, remedies.in_float32)
        fault = dataclasses.replace(_fault(each, kinds), in_float32=wide)
        if each is found[0]:
            fault = _with_changes(fault, remedies.of(each, in_float32=wide))
            note = "" if wide else note_of(each, remedies.in_float32, fault.remedy)
            fault = dataclasses.replace(fault, note=note)
        yield fault


def _kinds(found: list[Ran], case: Case) -> Kinds:
    kinds = Kinds([each.key for each in found])
    run(dataclasses.replace(case, trial=kinds))
    return kinds


def _told_underflow(ran: Ran, value: Value, remedies: Remedies) -> Fault:
    return _with_changes(_told(ran, value, "underflow"), remedies.of_underflow())


def _with_changes(fault: Fault, changes: tuple[Change, ...]) -> Fault:
    return dataclasses.replace(fault, remedy=written(changes), changes=changes)


def in_float32(case: Case) -> Step:
    """Returns a step in float32, an empty one where it cannot run so."""
    wide = attempted(dataclasses.replace(case, formats=Formats(torch.float32)))
    return wide or Step((), loss_finite=False, gradients_finite=False)


def _fault(ran: Ran, kinds: Kinds) -> Fault:
    made = ran.bad
    assert made is not None  # or it would be no fault
    assert made.held is not None
    kind = "nan" if made.held.has_nan else "inf"
    fault = _told(ran, made, kinds.found.get(ran.key, kind))
    largest = made.held.largest if ran.entered else ran.largest
    return dataclasses.replace(fault, largest=largest)


def _told(ran: Ran, value: Value, kind: str) -> Fault:
    return Fault(
        module=ran.key.path,
        operation=ran.key.word,
        phase=ran.key.phase,
        role=value.role,
        kind=kind,
        dtype=value.dtype,
        shape=value.shape,
        largest=ran.largest,
        source=ran.source,
        parameter=value.name,
    )
