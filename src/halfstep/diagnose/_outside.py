"""What is said of inf and NaN that no model has made, and of a scale that is for nothing."""

from collections.abc import Iterator

from halfstep.core import Finding, written
from halfstep.diagnose._asking import scaler_of
from halfstep.diagnose._heard import Evidence, Look
from halfstep.diagnose._placing import new_scaler

# What classic loss scales begin with, which a float16 gradient of a mean can bear.
_USUAL_POWER = 16
_MADE = (
    "At step {step}, what is not finite was made outside of every model{before}: look at the code "
    "between an output and the next model or the loss, such as a log or a division."
)
_CAME_BACK = (
    "At step {step}, gradients that are not finite came back from the loss, which is finite, at "
    "loss scale {scale:g}: {why}."
)
_DERIVED = (
    "At step {step}, the loss is made of gradients that are not finite, at loss scale {scale:g}: "
    "{why}."
)
_TOO_HIGH = "it is too high to begin with"
_DERIVATIVE = (
    "look at the derivatives of the code between the output of the model and the loss, such as "
    "that of a square root at 0"
)


def is_of_scale(look: Look, evidence: Evidence) -> bool:
    """Returns whether what came back to a model may be what a scaler finds its range by.

    Args:
        look: The step, looked at closely.
        evidence: What is known of all steps.
    """
    came_back = look.outside and (look.derived or not look.line)
    # A region scales nothing outside of itself.
    return came_back and not evidence.run.regions and _scale(look, evidence) > 1.0


def steps_of_scale(evidence: Evidence) -> set[int]:
    """Returns the skipped steps whose loss may be made of gradients that the scale let overflow.

    Args:
        evidence: What is known of all steps.
    """
    derived = any(each.derived and is_of_scale(each, evidence) for each in evidence.looks)
    return {step.number for step in evidence.report.skipped} if derived else set()


def made_outside(look: Look, evidence: Evidence) -> Finding:
    """Returns what there is to say of what no model has made.

    Args:
        look: The step, looked at closely.
        evidence: What is known of all steps.
    """
    if not is_of_scale(look, evidence):
        before = f", before {look.line}" if look.line else ""
        return Finding("error", _MADE.format(step=look.step, before=before))
    scale = _scale(look, evidence)
    too_high = scale > 2.0**_USUAL_POWER
    why = _TOO_HIGH if too_high else _DERIVATIVE
    text = (_DERIVED if look.derived else _CAME_BACK).format(step=look.step, scale=scale, why=why)
    changes = (new_scaler(evidence, _USUAL_POWER),) if too_high else ()
    return Finding("error", text, "", written(changes), changes)


def scaled_for_nothing(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    """Yields what there is to say of a script that scales its loss and computes in float32."""
    scaler = scaler_of(evidence.asked)
    computes = evidence.run.regions or evidence.half or not all(it.scales for it in evidence.asked)
    if scaler is not None and evidence.report.steps and not computes:
        text = f"The script scales its loss by {scaler.how}{scaler.where}, but asks for no format"
        yield Finding("warning", f"{text} of 16 bits: all of it ran in float32.")


def asked_late(evidence: Evidence, _: Look | None) -> Iterator[Finding]:
    """Yields which steps were looked at before the script asked for a precision."""
    first = min((each.step for each in evidence.asked), default=0)
    if first and evidence.report.steps and not (evidence.overrides or evidence.half):
        steps = "Step 1" if first == 1 else f"Steps 1 to {first}"
        text = f"{steps} ran by {evidence.run.policy}, before the script asked for a precision."
        yield Finding("note", text)


def _scale(look: Look, evidence: Evidence) -> float:
    scales = (step.scale for step in evidence.report.steps if step.number == look.step)
    return next(scales, None) or 1.0
