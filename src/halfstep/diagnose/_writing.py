"""What to write in a script, so that it can be pasted."""

import glob
import re
from dataclasses import replace
from typing import Any

from halfstep.core import Diagnosis, Policy, Ranges, Rules, complete, policy_text, quoted
from halfstep.diagnose._asking import Own, autocast_of, others_like, scaler_of
from halfstep.diagnose._heard import Evidence
from halfstep.launch import own_policies

_SCALER = "scaler = GradScaler(init_scale=2.0**{power})"
_SCALERS = {
    "keras": "optimizer = halfstep.keras.LossScaleOptimizer(optimizer, initial_scale=2.0**{power})",
    "jax": 'loss_scale = halfstep.jax.loss_scale("dynamic(init_scale={scale!r})")',
}
_REGION_OF_JAX = "halfstep.jax.autocast(f, policy, scale={scale!r})"
_BFLOAT16_OF_JAX = 'halfstep.jax.autocast(f, "mixed_bfloat16")'
_MASTERS = "keep_masters(optimizer)  # once the optimizer is made"
# A scaler in the last line, of which nothing is said.
_NEW = re.compile(r"^scaler = GradScaler\([^#\n]*\)\Z", re.MULTILINE)
_STEPS = "  # with scaler.scale(loss), scaler.step(optimizer) and scaler.update()"
_OF_OURS = "of halfstep.torch, in place of torch.autocast"
_EVERYWHERE = "set_global_policy(policy)  # or prepare(..., policy=policy), if the script does that"
_AGAIN = "region = prepare(model, optimizer, policy=policy)  # in place of how it was prepared"
_REASON = "Its values need the range."


def scaled(evidence: Evidence, ranges: Ranges) -> str:
    """Returns the scale to write, for a region or for a scaler, empty for the one in force."""
    framework, scale = _framework(evidence), ranges.region_scale
    # What enters a region of JAX is only known where there is one.
    if framework == "jax" and scale is not None:
        return complete(_REGION_OF_JAX.format(scale=scale))
    if framework == "" and evidence.run.regions and scale is not None:
        return _by_policy(evidence, scale=f"dynamic(init_scale={scale!r})")
    if ranges.power is None:
        return ""
    if framework == "":
        return complete(new_scaler(evidence, ranges.power))
    return complete(_SCALERS[framework].format(power=ranges.power, scale=ranges.scale))


def placed(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Returns a diagnosis in which a new scaler comes with what it takes the place of."""
    faults = tuple(
        replace(each, remedy=_placed(each.remedy, evidence)) for each in diagnosis.faults
    )
    return replace(diagnosis, faults=faults)


def _placed(remedy: str, evidence: Evidence) -> str:
    is_scaler = _NEW.search(remedy) is not None and _framework(evidence) == ""
    casts = (each for each in evidence.asked if each.casts)
    own = next((each for each in casts if each.source and remedy.endswith(each.where)), None)
    also = "" if own is None else _also(own, evidence)
    return f"{remedy}{_instead_of_scaler(evidence) if is_scaler else also}"


def _also(own: Own, evidence: Evidence) -> str:
    """Returns in which other lines it may be needed, too."""
    lines = " and ".join(others_like(own, evidence.asked))
    return f"; also in {lines}, if the same model is called there" if lines else ""


def new_scaler(evidence: Evidence, power: int) -> str:
    """Returns a scaler in place of the one that the script has, or to be used where it has none."""
    return f"{_SCALER.format(power=power)}{_instead_of_scaler(evidence)}"


def _instead_of_scaler(evidence: Evidence) -> str:
    own = scaler_of(evidence.asked)
    if own is None:
        return _STEPS if evidence.asked else ""
    return f"  # in place of the one{own.where}"


def with_rule(evidence: Evidence, ranges: Ranges, module: str) -> str:
    """Returns the rules by which a module runs in float32, empty where none reach it."""
    row = next(row for row in ranges.rows if row.module == module)
    own = autocast_of(evidence.asked, ranges.form)
    rules = _policy(evidence).rules if evidence.run.regions else _rules_of(own)
    for family in row.families:
        rules = rules.with_rule(family, "full", where=glob.escape(row.where), reason=_REASON)
    if not row.families or evidence.half or _framework(evidence) == "jax":
        return ""
    if evidence.run.regions or _in_keras(evidence):
        return _by_policy(evidence, rules=rules)
    lower = f"lower = autocast({_device(own)}dtype=torch.{ranges.form}, rules=rules)"
    text = f"rules = Rules.parse({quoted(str(rules))})\n{lower}  # {_instead(own, ours=True)}"
    return complete(text + ("" if own is None else _also(own, evidence)))


def in_bfloat16(evidence: Evidence) -> str:
    """Returns what trains in bfloat16, empty where that is so already."""
    if evidence.half:
        return ""
    if _framework(evidence) == "jax":
        return complete(_BFLOAT16_OF_JAX)
    if not evidence.run.regions and not _in_keras(evidence):
        return _autocast_in_bfloat16(autocast_of(evidence.asked, "float16"))
    lower = Policy.named("mixed_bfloat16")
    return _by_policy(evidence, compute_dtype=lower.compute_dtype, scale=lower.scale)


def _autocast_in_bfloat16(own: Own | None) -> str:
    if own is not None and own.form == "bfloat16":
        return ""
    name = "torch.autocast" if own is not None and own.native else "autocast"
    lower = f"lower = {name}({_device(own)}dtype=torch.bfloat16)"
    return complete(f"{lower}  # {_instead(own)}")


def _device(own: Own | None) -> str:
    return f"{quoted(own.device)}, " if own is not None and own.device else ""


def _rules_of(own: Own | None) -> Rules:
    return Rules.parse(own.rules) if own is not None and own.rules else Rules()


def _instead(own: Own | None, *, ours: bool = False) -> str:
    """Returns, in words, what an autocast takes the place of."""
    if own is None:
        return "in place of the script's own"
    return f"{_OF_OURS if ours and own.native else 'in place of the one'}{own.where}"


def with_masters() -> str:
    """Returns what keeps all bits of parameters in half precision."""
    return complete(_MASTERS)


def _framework(evidence: Evidence) -> str:
    """Returns "keras" or "jax", empty for PyTorch."""
    versions = dict(evidence.report.versions)
    return next((name for name in ("keras", "jax") if name in versions), "")


def _in_keras(evidence: Evidence) -> bool:
    return _framework(evidence) == "keras"


def _policy(evidence: Evidence) -> Policy:
    """Returns the policy in force, of the first region where there are several."""
    return Policy.parse((evidence.run.region_policies or (evidence.run.policy,))[0])


def _by_policy(evidence: Evidence, **changes: Any) -> str:
    policy = _policy(evidence).with_(**changes)
    if policy == _policy(evidence):
        return ""
    text = f"policy = {policy_text(policy)}"
    if _in_keras(evidence):
        return complete(f"{text}\nhalfstep.keras.set_global_policy(policy)")
    own = next((each for each in evidence.asked if each.has_policy), None)
    if own is not None and own.how == "set_global_policy":
        return complete(f"{text}\nset_global_policy(policy)  # in place of the one{own.where}")
    if own is not None or own_policies(evidence.run):
        return complete(f"{text}\n{_AGAIN}{'' if own is None else own.where}")
    return complete(f"{text}\n{_EVERYWHERE}")
