"""What to write in a script, so that it can be pasted."""

import math
from collections.abc import Sequence

from halfstep.core import Change, Policy, Ranges, Rule, policy_words, rules_for
from halfstep.diagnose._heard import Evidence
from halfstep.diagnose._placing import autocast_in_bfloat16, new_scaler, ruled_autocast
from halfstep.launch import own_policies

_SCALERS = {
    "keras": "optimizer = halfstep.keras.LossScaleOptimizer(optimizer, initial_scale=2.0**{power})",
    "jax": 'loss_scale = halfstep.jax.loss_scale("dynamic(init_scale={scale!r})")',
}
_REGION_OF_JAX = "halfstep.jax.autocast(f, policy, scale={scale!r})"
_BFLOAT16_OF_JAX = 'halfstep.jax.autocast(f, "mixed_bfloat16")'
_MASTERS = "keep_masters(optimizer)  # once the optimizer is made"
_EVERYWHERE = "set_global_policy(policy)  # or prepare(..., policy=policy), if the script does that"
_AGAIN = "region = prepare(model, optimizer, policy=policy)  # in place of how it was prepared"
_IN_KERAS = "halfstep.keras.set_global_policy(policy)"
_SET = "set_global_policy(policy)  # in place of the one"
_AUTOCASTS = "autocast*"


def fitted(
    evidence: Evidence, ranges: Ranges, modules: Sequence[str], *, rescaled: bool
) -> tuple[Change, ...]:
    """Returns a scale, and rules by which modules run in float32, nothing where no rules do.

    Args:
        evidence: What is known of the training.
        ranges: The numbers of the modules.
        modules: Those that run in float32.
        rescaled: Whether the scale in force is to be another one.
    """
    can_rule = not evidence.half and _framework(evidence) != "jax"
    rules = rules_for(ranges, modules) if can_rule else ()
    if modules and not (rules or evidence.half):
        return ()
    scaled = _scaled(evidence, ranges, rules) if rescaled else ()
    return scaled or _ruled(evidence, ranges, rules)


def begun_with(evidence: Evidence, scale: float) -> tuple[Change, ...]:
    """Returns a scaler, or the scale of a region, that begins with a scale that suits.

    Args:
        evidence: What is known of the training.
        scale: That scale.
    """
    framework = _framework(evidence)
    if framework == "" and evidence.run.regions:
        return _by_policy(evidence, f"dynamic(init_scale={scale!r})", ())
    power = math.frexp(scale)[1] - 1
    if framework == "":
        return (new_scaler(evidence, power),)
    use = _SCALERS[framework].format(power=power, scale=scale)
    return (Change(use, "scaler", scale=repr(math.ldexp(1.0, power))),)


def _scaled(evidence: Evidence, ranges: Ranges, rules: tuple[Rule, ...]) -> tuple[Change, ...]:
    """Returns a scale with rules, for a region or for a scaler; nothing where it is in force."""
    framework, scale = _framework(evidence), ranges.region_scale
    # What enters a region of JAX is only known where there is one.
    if framework == "jax" and scale is not None:
        return (Change(_REGION_OF_JAX.format(scale=scale), "scaler", scale=repr(scale)),)
    if framework == "" and evidence.run.regions and scale is not None:
        return _by_policy(evidence, f"dynamic(init_scale={scale!r})", rules)
    if ranges.power in (None, evidence.report.power):
        return ()
    if framework == "":
        return (*_ruled(evidence, ranges, rules), new_scaler(evidence, ranges.power))
    use = _SCALERS[framework].format(power=ranges.power, scale=ranges.scale)
    return (*_ruled(evidence, ranges, rules), Change(use, "scaler", scale=repr(ranges.scale)))


def _ruled(evidence: Evidence, ranges: Ranges, rules: tuple[Rule, ...]) -> tuple[Change, ...]:
    """Returns rules on top of those in force, nothing without any."""
    if not rules:
        return ()
    if evidence.run.regions or _framework(evidence) == "keras":
        return _by_policy(evidence, "", rules)
    use, known = ruled_autocast(evidence, ranges.form)
    base = policy_words(Policy.named("mixed_float16").with_(rules=known))
    return (Change(use, _AUTOCASTS, base, rules=rules),)


def in_bfloat16(evidence: Evidence) -> tuple[Change, ...]:
    """Returns what trains in bfloat16, nothing where that is so already.

    Args:
        evidence: What is known of the training.
    """
    if evidence.half:
        return ()
    lower, framework = Policy.named("mixed_bfloat16"), _framework(evidence)
    if framework == "jax":
        return (Change(_BFLOAT16_OF_JAX, "policy", instead=str(lower)),)
    if not evidence.run.regions and framework != "keras":
        use = autocast_in_bfloat16(evidence)
        return (Change(use, _AUTOCASTS, instead=str(lower)),) if use else ()
    policy = _policy(evidence)
    wide = policy.with_(compute_dtype=lower.compute_dtype, scale=lower.scale)
    if wide == policy:
        return ()
    return (Change(_use(evidence), "policy", str(policy), instead=policy_words(wide)),)


def with_masters() -> tuple[Change, ...]:
    """Returns what keeps all bits of parameters in half precision."""
    return (Change(_MASTERS, "parameters"),)


def _framework(evidence: Evidence) -> str:
    """Returns "keras" or "jax", empty for PyTorch."""
    versions = dict(evidence.report.versions)
    return next((name for name in ("keras", "jax") if name in versions), "")


def _policy(evidence: Evidence) -> Policy:
    """Returns the policy in force, of the first region where there are several."""
    regions = tuple(map(Policy.parse, evidence.run.region_policies))
    return next(iter(regions or evidence.run.asked), Policy.named("float32"))


def _by_policy(evidence: Evidence, scale: str, rules: tuple[Rule, ...]) -> tuple[Change, ...]:
    """Returns the policy in force with another scale and more rules, nothing where it has them."""
    policy = _policy(evidence)
    known = {each.key: each.action for each in policy.rules.edits}
    more = tuple(each for each in rules if known.get(each.key) != each.action)
    if not more and (not scale or policy.with_(scale=scale) == policy):
        return ()
    return (Change(_use(evidence), "policy", policy_words(policy), scale=scale, rules=more),)


def _use(evidence: Evidence) -> str:
    """Returns the line by which a policy takes effect."""
    if _framework(evidence) == "keras":
        return _IN_KERAS
    own = next((each for each in evidence.asked if each.has_policy), None)
    if own is not None and own.how == "set_global_policy":
        return f"{_SET}{own.where}"
    if own is not None or own_policies(evidence.run):
        return f"{_AGAIN}{'' if own is None else own.where}"
    return _EVERYWHERE
