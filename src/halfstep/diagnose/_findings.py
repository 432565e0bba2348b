"""What there is to know of a training, and what to do about it."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from halfstep.core import (
    SEVERITIES,
    Change,
    Diagnosis,
    Finding,
    Report,
    culprits_text,
    written,
)
from halfstep.diagnose._growing import Growth, Swelling, growth_of, swelling_of
from halfstep.diagnose._heard import HALF, Evidence, Look
from halfstep.diagnose._misfit import MANY_LOST, misfit
from halfstep.diagnose._outlying import outlying, times_of
from halfstep.diagnose._outside import (
    asked_late,
    is_of_scale,
    made_outside,
    scaled_for_nothing,
    steps_of_scale,
)
from halfstep.diagnose._placing import placed
from halfstep.diagnose._real import is_real
from halfstep.diagnose._searching import is_stuck, searched_long
from halfstep.diagnose._writing import with_masters
from halfstep.launch import LIKELY_REASONS, WHAT_TO_CHECK, why_ineffective, why_untrained
from halfstep.report import share_text

_SHOWN_MODULES = 5
_INSTEAD = {
    "keras": "Looked at is what `fit` calls, and models that the script calls itself; for others, "
    "write halfstep.keras.diagnose(model, x, y).",
    "jax": "Looked at are calls of functions given to jax.jit, jax.grad or jax.value_and_grad that "
    "take gradients, and none was seen; for others, write "
    "halfstep.jax.diagnose(function, *arguments).",
}


def findings(evidence: Evidence) -> Report:
    """Returns the report with all that was found, the gravest first.

    Args:
        evidence: What is known.
    """
    decisive = _decisive(evidence)
    diagnosis = decisive.report.diagnosis if decisive else evidence.report.diagnosis
    if _growth(evidence, decisive):
        diagnosis = _without_remedies(diagnosis)
    elif decisive is None:
        diagnosis = _with_scale(diagnosis, evidence)
    report = replace(evidence.report, diagnosis=placed(diagnosis, evidence))
    found = [each for find in _FINDERS for each in find(replace(evidence, report=report), decisive)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return replace(report, findings=tuple(_told_once(found)))


def _told_once(found: Iterable[Finding]) -> Iterator[Finding]:
    """Yields findings, of which only the first says what to write where several say the same."""
    told: set[str] = set()
    for each in found:
        yield replace(each, remedy="", changes=()) if each.remedy in told else each
        told.add(each.remedy)


def _without_remedies(diagnosis: Diagnosis) -> Diagnosis:
    faults = tuple(replace(fault, remedy="", changes=()) for fault in diagnosis.faults)
    return replace(diagnosis, faults=faults)


def _with_scale(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Returns a diagnosis whose first fault has what lets all gradients of the training fit.

    What an operation lost in one step tells less of a scale than the numbers of all modules do.
    """
    found = misfit(replace(evidence.report, diagnosis=diagnosis))
    first = diagnosis.first
    if first is None or first.kind != "underflow" or found is None:
        return diagnosis
    changes = found.changes(evidence)
    fault = replace(first, remedy=written(changes), changes=changes)
    return replace(diagnosis, faults=(fault, *diagnosis.faults[1:]))


def _decisive(evidence: Evidence) -> Look | None:
    """Returns the look that shows what is broken, None where nothing is.

    What overflows in a backward pass is what a scale finds its range by, unless it goes on so.
    """
    failed = [look for look in evidence.looks if look.failed and _shows(look)]
    skipped = {step.number for step in evidence.report.skipped}
    real = [
        look
        for look in failed
        if not times_of(look, evidence)
        if _is_made_outside(look, evidence)
        or is_real(look.report.diagnosis)
        or look.step not in skipped
    ]
    lasting = failed[-1:] if is_stuck(evidence.report) else []
    return next(iter(real or lasting), None)


def _growth(evidence: Evidence, decisive: Look | None) -> Growth | Swelling | None:
    """Returns how the loss or the parameters have grown before it broke, None where neither has."""
    if decisive is None:
        return None
    losses = {step.number: step.loss for step in evidence.report.steps}
    after = losses.get(decisive.step + 1)
    # That it breaks in the next step belongs to it.
    until = decisive.step + (after is not None and not math.isfinite(after))
    grown = growth_of([loss for number, loss in losses.items() if number <= until])
    return grown or swelling_of(decisive, evidence)


def _shows(look: Look) -> bool:
    return look.outside or bool(look.report.diagnosis)


def _is_made_outside(look: Look, evidence: Evidence) -> bool:
    return look.outside and not is_of_scale(look, evidence)


def _untrained(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    report = evidence.report
    ended = not (report.error or report.stopped)
    if not report.steps and ended and evidence.frameworks != ("jax",):
        why = why_untrained(evidence.run)
        yield Finding("error", f"Nothing was trained: {why}. {WHAT_TO_CHECK}")
    if report.steps and _is_by_hand(report):
        text = "No optimizer was seen: each loss counts as a step, and no ranges were looked at."
        yield Finding("note", text)
    if report.steps and evidence.ineffective:
        why = f"{why_ineffective(evidence.run)}. {LIKELY_REASONS}"
        if evidence.half:
            why = f"the script trains parameters in {evidence.half} itself, which are left alone."
        yield Finding("error", f"{evidence.run.policy} did not take effect, because {why}")


def _is_by_hand(report: Report) -> bool:
    return all(step.scale is None for step in report.steps)


def _frameworks(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    for name in () if evidence.looks or evidence.unseen else evidence.frameworks:
        if name in _INSTEAD and (name == "keras" or evidence.frameworks == ("jax",)):
            yield Finding("note" if evidence.report.steps else "error", _INSTEAD[name])


def _fault(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    fault = evidence.report.diagnosis.first
    if fault is not None:
        step = decisive or _sampled(evidence)
        what, _, _ = str(fault).partition("\n")
        text = what.removeprefix(f"{fault.module}: ")
        text = text[:1].upper() + text[1:]
        severity = "error" if decisive or fault.breaks else "warning"
        when = "" if _is_by_hand(evidence.report) else f" (step {step.step})"
        more = _of_misfit(evidence, decisive)
        yield Finding(severity, f"{text}{when}.{more}", fault.module, fault.remedy, fault.changes)
    elif decisive and decisive.outside:
        yield made_outside(decisive, evidence)


def _of_misfit(evidence: Evidence, decisive: Look | None) -> str:
    """Returns what else there is to say of a fault of small numbers, which has the same remedy."""
    fault = evidence.report.diagnosis.first
    is_small = decisive is None and fault is not None and not fault.breaks
    found = misfit(evidence.report) if is_small else None
    return f" {found.named_text}" if found is not None and (found.lost or found.modules) else ""


def _sampled(evidence: Evidence) -> Look:
    """Returns the look that has shown the fault."""
    sampled = [look for look in evidence.looks if not look.failed]
    fault = evidence.report.diagnosis.first
    return next((look for look in sampled if look.report.diagnosis.first == fault), sampled[-1])


def _diverging(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    growth = _growth(evidence, decisive)
    if growth is not None:
        yield Finding("error", str(growth))


def _outlying(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    for look in _outliers(evidence) if decisive is None else ():
        yield outlying(look, evidence)


def _outliers(evidence: Evidence) -> list[Look]:
    return [look for look in evidence.looks if look.failed and times_of(look, evidence)]


def _losses(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    losses = {it.number: it.loss for it in evidence.report.steps if it.loss is not None}
    broken = [number for number, loss in losses.items() if not math.isfinite(loss)]
    if broken:
        known = {look.step for look in _outliers(evidence)} | steps_of_scale(evidence)
        explained = known.issuperset(broken)
        text = f"{len(broken)} of {len(losses)} losses {_are(len(broken))} not finite."
        yield Finding("note" if decisive or explained else "error", text)


def _skips(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    report = evidence.report
    if report.skipped:
        worst = report.skipped[-1]
        names = f", the last for {culprits_text(worst.nonfinite)}" if worst.nonfinite else ""
        why = f": {worst.reason}{names}" if worst.reason else ""
        count = len(report.skipped)
        were = "was" if count == 1 else "were"
        text = f"{count} of {len(report.steps)} steps {were} skipped{why}."
        stands = is_stuck(report) and not decisive
        yield Finding("warning" if stands else "note", text)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _misfit(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    fault = evidence.report.diagnosis.first
    told = decisive or (fault is not None and not fault.breaks)
    # What a decisive fault made leaves its marks everywhere.
    found = None if told else misfit(evidence.report)
    if found is not None:
        changes = found.changes(evidence)
        yield _finding("warning", found.text, found.module, changes)


def _finding(severity: str, text: str, module: str, changes: Iterable[Change]) -> Finding:
    return Finding(severity, text, module, written(changes), tuple(changes))


def _updates(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    ranges = evidence.report.ranges
    # In float32 it is the learning rate that is small, which no format helps.
    lost = [pair for pair in ranges.updates if evidence.half and pair[1] > MANY_LOST]
    for name, share in sorted(lost, key=lambda pair: -pair[1])[:_SHOWN_MODULES]:
        text = f"{share_text(share)} of its updates change nothing, because they round to nothing."
        yield _finding("warning", text, name, with_masters())


def _moments(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    """Yields what an Adam loses that keeps its state in the format of the parameters."""
    found = [each for each in evidence.report.ranges.moments if each.form in HALF]
    fault = evidence.report.diagnosis.first
    broken = fault is not None and fault.operation in ("data", "update") and fault.role == "weight"
    for each in [it for it in found if it.eps_vanishes][:1]:
        text = f"eps={each.eps:g} of its optimizer is 0 in {each.form}, so that steps divide by 0."
        severity = "error" if broken else "warning"
        yield _finding(severity, text, each.parameter, with_masters())
    lost = [each for each in found if each.vanishing > MANY_LOST]
    for each in sorted(lost, key=lambda it: -it.vanishing)[:_SHOWN_MODULES]:
        share = share_text(each.vanishing)
        text = f"{share} of the squares of its gradients become 0 in {each.form}, where Adam keeps"
        yield _finding("warning", f"{text} them.", each.parameter, with_masters())


def _unseen(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    sound = [look for look in evidence.looks if look.failed and not _shows(look)]
    for look in sound[:1] if decisive is None else ():
        yield Finding("note", f"Step {look.step} was run again and made neither inf nor NaN.")
    for step, why in evidence.unseen[:1]:
        yield Finding("note", f"Step {step} could not be looked at closely: {why.rstrip('.')}.")


def _notes(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    for text in dict.fromkeys(evidence.notes if evidence.report.steps else ()):
        yield Finding("note", text)


_FINDERS: tuple[Callable[[Evidence, Look | None], Iterator[Finding]], ...] = (
    _untrained,
    _frameworks,
    _diverging,
    _fault,
    searched_long,
    scaled_for_nothing,
    asked_late,
    _outlying,
    _losses,
    _skips,
    _misfit,
    _updates,
    _moments,
    _unseen,
    _notes,
)
