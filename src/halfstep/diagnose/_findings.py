"""What there is to know of a training, and what to do about it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from halfstep.core import (
    FORWARD,
    SEVERITIES,
    Diagnosis,
    Finding,
    Ranges,
    Report,
    Rules,
    culprits_text,
)
from halfstep.diagnose._heard import Evidence, Look
from halfstep.launch import LIKELY_REASONS, why_ineffective, why_untrained
from halfstep.report import share_text

_MANY_LOST = 0.01
_MANY_SKIPS = 0.1
_IN_A_ROW = 3
# A scale may be looked for by a few skips in as many steps.
_SEARCHED = 50
_SHOWN_MODULES = 5
_SCALERS = {
    "keras": "halfstep.keras.LossScaleOptimizer(optimizer, initial_scale=2.0**{power})",
    "jax": 'loss_scale = halfstep.jax.loss_scale("dynamic(init_scale={scale!r})")',
    "": "scaler = GradScaler(init_scale=2.0**{power})",
}
_REGIONS = {
    "jax": "halfstep.jax.autocast(f, policy, scale={scale!r})",
    "": 'policy = policy.with_(scale="dynamic(init_scale={scale!r})")',
}
_HALF = ("float16", "bfloat16")
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
    report = replace(evidence.report, diagnosis=diagnosis)
    found = [each for find in _FINDERS for each in find(replace(evidence, report=report), decisive)]
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return replace(report, findings=tuple(found))


def _decisive(evidence: Evidence) -> Look | None:
    """Returns the look that shows what is broken, None where nothing is.

    What overflows in a backward pass is what a scale finds its range by, unless it goes on so.
    """
    failed = [look for look in evidence.looks if look.failed and _shows(look)]
    skipped = {step.number for step in evidence.report.skipped}
    real = [
        look
        for look in failed
        if look.outside or _is_forward(look.report.diagnosis) or look.step not in skipped
    ]
    lasting = failed[-1:] if _is_stuck(evidence.report) else []
    return next(iter(real or lasting), None)


def _shows(look: Look) -> bool:
    return look.outside or bool(look.report.diagnosis)


def _is_forward(diagnosis: Diagnosis) -> bool:
    return diagnosis.first is not None and diagnosis.first.phase == "forward"


def _is_stuck(report: Report) -> bool:
    last = report.steps[-_IN_A_ROW:]
    ends_so = len(last) == _IN_A_ROW and all(step.skipped for step in last)
    return ends_so or len(report.skipped) > _MANY_SKIPS * max(len(report.steps), _SEARCHED)


def _untrained(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    report = evidence.report
    if not report.steps and not report.error and evidence.frameworks != ("jax",):
        yield Finding("error", f"Nothing was trained: {why_untrained(evidence.run)}.")
    if report.steps and _is_by_hand(report):
        text = "No optimizer was seen: each loss counts as a step, and no ranges were looked at."
        yield Finding("note", text)
    if report.steps and evidence.ineffective:
        why = why_ineffective(evidence.run)
        text = f"{evidence.run.policy} did not take effect, because {why}. {LIKELY_REASONS}"
        yield Finding("error", text)


def _is_by_hand(report: Report) -> bool:
    return all(step.scale is None for step in report.steps)


def _frameworks(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    for name in () if evidence.looks or evidence.unseen else evidence.frameworks:
        if name in _INSTEAD and (name == "keras" or evidence.frameworks == ("jax",)):
            yield Finding("note" if evidence.report.steps else "error", _INSTEAD[name])


def _fault(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    fault = evidence.report.diagnosis.first
    if fault is not None:
        step = decisive or _last_sampled(evidence)
        what, _, _ = str(fault).partition("\n")
        text = what.removeprefix(f"{fault.module}: ")
        text = text[:1].upper() + text[1:]
        severity = "error" if decisive else "warning"
        when = "" if _is_by_hand(evidence.report) else f" (step {step.step})"
        yield Finding(severity, f"{text}{when}.", fault.module, fault.remedy)
    elif decisive and decisive.outside:
        before = f", before {decisive.line}" if decisive.line else ""
        yield Finding(
            "error",
            f"At step {decisive.step}, what is not finite was made outside of every model{before}: "
            "look at the code between its output and the loss, such as a log or a division.",
        )


def _last_sampled(evidence: Evidence) -> Look:
    return [look for look in evidence.looks if not look.failed][-1]


def _losses(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    losses = [step.loss for step in evidence.report.steps if step.loss is not None]
    broken = sum(not math.isfinite(loss) for loss in losses)
    if broken:
        text = f"{broken} of {len(losses)} losses {_are(broken)} not finite."
        yield Finding("note" if decisive else "error", text)


def _skips(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    report = evidence.report
    if report.skipped:
        worst = report.skipped[-1]
        names = f", the last for {culprits_text(worst.nonfinite)}" if worst.nonfinite else ""
        why = f": {worst.reason}{names}" if worst.reason else ""
        count = len(report.skipped)
        were = "was" if count == 1 else "were"
        text = f"{count} of {len(report.steps)} steps {were} skipped{why}."
        stands = _is_stuck(report) and not decisive
        yield Finding("warning" if stands else "note", text)


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _ranges(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    report = evidence.report
    if decisive:
        return  # What it made leaves its marks everywhere.
    ranges = report.narrow
    lost = ranges.lost(report.power)
    if lost > _MANY_LOST:
        told = report.diagnosis.first is not None and report.diagnosis.first.remedy
        remedy = "" if told else _scale(evidence, ranges)
        text = f"{share_text(lost)} of the gradients become 0 in {ranges.form}"
        yield Finding("warning", f"{text} at the scale in force, 2^{report.power}.", "", remedy)
    suffering = [name for name in ranges.outside if _suffers(ranges, report.power, name)]
    for name in suffering[:_SHOWN_MODULES]:
        text = f"Its values need more range than {ranges.form} has, at any scale."
        yield Finding("warning", text, name, _rule(ranges, name))
    if suffering[_SHOWN_MODULES:]:
        text = f"So do those of {len(suffering) - _SHOWN_MODULES} more modules."
        yield Finding("warning", text, "", 'policy="mixed_bfloat16"')


def _suffers(ranges: Ranges, power: int, module: str) -> bool:
    """Returns whether a module that no scale suits loses many gradients, or overflows."""
    forward = [row for row in ranges.rows if row.module == module and row.role in FORWARD]
    overflows = any(row.reference.overflowed(ranges.form) for row in forward)
    return overflows or ranges.lost(power, module=module) > _MANY_LOST


def _scale(evidence: Evidence, ranges: Ranges) -> str:
    """Returns the scale to write, for a region or for a scaler."""
    versions = dict(evidence.report.versions)
    framework = next((name for name in ("keras", "jax") if name in versions), "")
    # What enters a region of JAX is only known where there is one.
    in_region = {"keras": False, "jax": True}.get(framework, bool(evidence.run.regions))
    if in_region and ranges.region_scale is not None:
        return _REGIONS[framework].format(scale=ranges.region_scale)
    scale, power = ranges.scale, ranges.power
    return "" if power is None else _SCALERS[framework].format(power=power, scale=scale)


def _rule(ranges: Ranges, module: str) -> str:
    families = next(row.families for row in ranges.rows if row.module == module)
    rules = Rules()
    for family in families:
        rules = rules.with_rule(family, "full", where=module, reason="Its values need the range.")
    return f"policy = policy.with_(rules={str(rules)!r})" if rules.edits else ""


def _updates(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    ranges = evidence.report.ranges
    # In float32 it is the learning rate that is small, which no format helps.
    narrow = any(row.role == "weight" and row.form in _HALF for row in ranges.rows)
    lost = [pair for pair in ranges.updates if narrow and pair[1] > _MANY_LOST]
    for name, share in sorted(lost, key=lambda pair: -pair[1])[:_SHOWN_MODULES]:
        text = f"{share_text(share)} of its updates change nothing, because they round to nothing."
        yield Finding("warning", text, name, 'prepare(model, optimizer, policy, masters="split")')


def _unseen(evidence: Evidence, decisive: Look | None) -> Iterator[Finding]:
    sound = [look for look in evidence.looks if look.failed and not _shows(look)]
    for look in sound[:1] if decisive is None else ():
        yield Finding("note", f"Step {look.step} was run again and made neither inf nor NaN.")
    for step, why in evidence.unseen[:1]:
        yield Finding("note", f"Step {step} could not be looked at closely: {why}.")


def _notes(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    for text in dict.fromkeys(evidence.notes if evidence.report.steps else ()):
        yield Finding("note", text)


_FINDERS: tuple[Callable[[Evidence, Look | None], Iterator[Finding]], ...] = (
    _untrained,
    _frameworks,
    _fault,
    _losses,
    _skips,
    _ranges,
    _updates,
    _unseen,
    _notes,
)
