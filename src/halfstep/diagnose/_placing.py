"""What a line to write takes the place of in a script that asks for a precision itself."""

import re
from dataclasses import replace

from halfstep.core import Change, Diagnosis, Fault, Rules, quoted, written
from halfstep.diagnose._asking import Own, autocast_of, others_like, scaler_of
from halfstep.diagnose._heard import Evidence

_SCALER = "scaler = GradScaler(init_scale=2.0**{power})"
# A scaler in the last line, of which nothing is said.
_NEW = re.compile(r"^scaler = GradScaler\([^#\n]*\)\Z", re.MULTILINE)
_STEPS = "  # with scaler.scale(loss), scaler.step(optimizer) and scaler.update()"
_OF_OURS = "of halfstep.torch, in place of torch.autocast"


def placed(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Returns a diagnosis in which a new scaler comes with what it takes the place of."""
    if dict(evidence.report.versions).keys() & {"keras", "jax"}:
        return diagnosis
    return replace(diagnosis, faults=tuple(_placed(each, evidence) for each in diagnosis.faults))


def _placed(fault: Fault, evidence: Evidence) -> Fault:
    if not fault.changes:
        return replace(fault, remedy=_with_place(fault.remedy, evidence))
    changes = tuple(replace(each, use=_with_place(each.use, evidence)) for each in fault.changes)
    return replace(fault, remedy=written(changes), changes=changes)


def _with_place(text: str, evidence: Evidence) -> str:
    if _NEW.search(text):
        return f"{text}{_instead_of_scaler(evidence)}"
    casts = (each for each in evidence.asked if each.casts)
    own = next((each for each in casts if each.source and text.endswith(each.where)), None)
    return f"{text}{_also(own, evidence)}"


def _also(own: Own | None, evidence: Evidence) -> str:
    """Returns in which other lines it may be needed, too."""
    lines = " and ".join(others_like(own, evidence.asked)) if own is not None else ""
    return f"; also in {lines}, if the same model is called there" if lines else ""


def new_scaler(evidence: Evidence, power: int) -> Change:
    """Returns a scaler in place of the one that the script has, or to be used where it has none."""
    use = f"{_SCALER.format(power=power)}{_instead_of_scaler(evidence)}"
    return Change(use, "scaler", scale=repr(2.0**power))


def _instead_of_scaler(evidence: Evidence) -> str:
    own = scaler_of(evidence.asked)
    if own is None:
        return _STEPS if evidence.asked else ""
    return f"  # in place of the one{own.where}"


def ruled_autocast(evidence: Evidence, form: str) -> tuple[str, Rules]:
    """Returns the autocast that is to have more rules, as a line, and the rules that it has."""
    own = autocast_of(evidence.asked, form)
    lower = f"lower = autocast({_device(own)}dtype=torch.{form}, rules=rules)"
    known = Rules.parse(own.rules) if own is not None and own.rules else Rules()
    return f"{lower}  # {_instead(own, ours=True)}{_also(own, evidence)}", known


def autocast_in_bfloat16(evidence: Evidence) -> str:
    """Returns the autocast that is to be in bfloat16, as a line, empty where it is already."""
    own = autocast_of(evidence.asked, "float16")
    if own is not None and own.form == "bfloat16":
        return ""
    name = "torch.autocast" if own is not None and own.native else "autocast"
    return f"lower = {name}({_device(own)}dtype=torch.bfloat16)  # {_instead(own)}"


def _device(own: Own | None) -> str:
    return f"{quoted(own.device)}, " if own is not None and own.device else ""


def _instead(own: Own | None, *, ours: bool = False) -> str:
    """Returns, in words, what an autocast takes the place of."""
    if own is None:
        return "in place of the script's own"
    return f"{_OF_OURS if ours and own.native else 'in place of the one'}{own.where}"
