"""From what was seen in a step to what is told of it."""

import dataclasses
from collections.abc import Iterator

import torch

from halfstep.core import Diagnosis, Fault, Rule
from halfstep.torch._observing._formats import Formats
from halfstep.torch._observing._ran import Ran, Value
from halfstep.torch._observing._remedy import Remedies, attempted
from halfstep.torch._observing._settling import settled
from halfstep.torch._observing._step import Case, Step, run
from halfstep.torch._observing._trial import Kinds
from halfstep.torch._observing._verdict import faults, is_in_float32, underflows
from halfstep.torch._observing._ways import way_of


def diagnosis(case: Case) -> Diagnosis:
    """Returns the faults of a step, each with what to write."""
    remedies = _remedies(*settled(case))
    found = faults(remedies.step, remedies.in_float32)
    told = _told_faults(found, remedies) if found else _told_underflow(remedies)
    return Diagnosis(tuple(told), remedies.scale)


def widening(case: Case) -> tuple[Fault, tuple[Rule, ...]] | None:
    """Returns the first fault of a step and the rules that leave none, None where no rules do."""
    remedies = _remedies(case, run(case))
    for each in faults(remedies.step, remedies.in_float32):
        edits = remedies.edits(each)
        return (_fault(each, _kinds([each], case)), edits) if edits else None
    return None


def _remedies(case: Case, step: Step) -> Remedies:
    return Remedies(case, step, in_float32(case), way_of(case.model, step.asked))


def _told_faults(found: list[Ran], remedies: Remedies) -> Iterator[Fault]:
    kinds = _kinds(found, remedies.case)
    for each in found:
        wide = is_in_float32(each, remedies.in_float32)
        remedy = remedies.of(each, in_float32=wide) if each is found[0] else ""
        yield dataclasses.replace(_fault(each, kinds), in_float32=wide, remedy=remedy)


def _kinds(found: list[Ran], case: Case) -> Kinds:
    kinds = Kinds([each.key for each in found])
    run(dataclasses.replace(case, trial=kinds))
    return kinds


def _told_underflow(remedies: Remedies) -> Iterator[Fault]:
    for each, value in underflows(remedies.step, remedies.in_float32):
        fault = _told(each, value, "underflow")
        yield dataclasses.replace(fault, remedy=remedies.of_underflow())
        return


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
    )
