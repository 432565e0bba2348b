"""What to write in a script, so that it can be pasted."""

import glob
import re
from typing import Any

from halfstep.core import Policy, Range, Ranges, Rules, complete, policy_text, quoted
from halfstep.diagnose._heard import Evidence
from halfstep.launch import own_policies

_SCALERS = {
    "": "scaler = GradScaler(init_scale=2.0**{power})",
    "keras": "optimizer = halfstep.keras.LossScaleOptimizer(optimizer, initial_scale=2.0**{power})",
    "jax": 'loss_scale = halfstep.jax.loss_scale("dynamic(init_scale={scale!r})")',
}
_REGION_OF_JAX = "halfstep.jax.autocast(f, policy, scale={scale!r})"
_BFLOAT16_OF_JAX = 'halfstep.jax.autocast(f, "mixed_bfloat16")'
_MASTERS = "keep_masters(optimizer)  # once the optimizer is made"
_EVERYWHERE = "set_global_policy(policy)  # or prepare(..., policy=policy), if the script does that"
_AGAIN = "region = prepare(model, optimizer, policy=policy)  # in place of how it was prepared"
_SELECTS = re.compile(r"(?m)^.*where=.*$")
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
    return complete(_SCALERS[framework].format(power=ranges.power, scale=ranges.scale))


def with_rule(evidence: Evidence, ranges: Ranges, module: str) -> str:
    """Returns the rules by which a module runs in float32, empty where none reach it."""
    row = next(row for row in ranges.rows if row.module == module)
    rules = _policy(evidence).rules if evidence.run.regions else Rules()
    for family in row.families:
        rules = rules.with_rule(family, "full", where=glob.escape(row.where), reason=_REASON)
    if not row.families or evidence.half or _framework(evidence) == "jax":
        return ""
    return _in_model(row, _ruled(evidence, ranges, rules))


def _in_model(row: Range, text: str) -> str:
    """Returns a text that says in which of several models the path of its rules is."""
    model = row.module.removesuffix(f".{row.where}")
    if not row.where or model == row.module:
        return text
    return _SELECTS.sub(lambda line: f"{line[0]}  # in {model}", text)


def _ruled(evidence: Evidence, ranges: Ranges, rules: Rules) -> str:
    if evidence.run.regions or _in_keras(evidence):
        return _by_policy(evidence, rules=rules)
    lower = f"lower = autocast(dtype=torch.{ranges.form}, rules=rules)"
    text = f"rules = Rules.parse({quoted(str(rules))})\n{lower}  # in place of the script's own"
    return complete(text)


def in_bfloat16(evidence: Evidence) -> str:
    """Returns what trains in bfloat16, empty where that is so already."""
    if evidence.half:
        return ""
    if _framework(evidence) == "jax":
        return complete(_BFLOAT16_OF_JAX)
    if not evidence.run.regions and not _in_keras(evidence):
        return complete("lower = autocast(dtype=torch.bfloat16)  # in place of the script's own")
    lower = Policy.named("mixed_bfloat16")
    return _by_policy(evidence, compute_dtype=lower.compute_dtype, scale=lower.scale)


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
    if own_policies(evidence.run):
        return complete(f"{text}\n{_AGAIN}")
    return complete(f"{text}\n{_EVERYWHERE}")
