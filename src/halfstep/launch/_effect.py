"""What a run really trained under, which need not be what was asked for."""

from halfstep.core import brief, is_auto
from halfstep.launch._runs import RunResult

NO_REGION = "no model became a region"
LIKELY_REASONS = (
    "Only modules that are called become regions: not functions on bare tensors, not modules that "
    "are called only inside a function given to torch.compile (give it the module instead), not "
    "those that train parameters in half precision."
)

UNSCALED = (
    "the losses were not scaled, so that small gradients are lost in float16: choose "
    "mixed_bfloat16, or call scale_loss of a LossScaleOptimizer in the script's own loop"
)


def policy_text(run: RunResult) -> str:
    """Returns the policies of a run, those that the script chose itself marked.

    Args:
        run: A run that trained.

    Example:
        >>> policy_text(RunResult(policy="mixed_bfloat16", region_policies=("mixed_float16",)))
        "mixed_float16 (the script's own)"
        >>> policy_text(RunResult(policy="mixed_float16", lowered=False))
        'float32 (mixed_float16 did not take effect)'
    """
    own = own_policies(run)
    if own:
        others = f"{', '.join(own)} (the script's own)"
        return others if len(own) == len(run.region_policies) else f"{asked_text(run)}; {others}"
    if run.ineffective:
        kept = "the script's own torch.amp" if run.torch_amp else "float32"
        return f"{kept} ({run.policy} did not take effect)"
    return asked_text(run)


def asked_text(run: RunResult) -> str:
    """Returns the policy that a run was to train under, and in brief what `auto` stood for.

    Example:
        >>> asked_text(RunResult(policy="auto", auto=("mixed_bfloat16",)))
        'auto: mixed_bfloat16'
    """
    found = "; ".join(map(brief, run.asked)) if is_auto(run.policy) else ""
    return f"{run.policy}: {found}" if found else run.policy


def own_policies(run: RunResult) -> tuple[str, ...]:
    """Returns the policies of the run's regions that are not the run's."""
    if not run.region_policies:
        return ()
    asked = set(map(str, run.asked))
    return tuple(each for each in run.region_policies if each not in asked)


def why_ineffective(run: RunResult) -> str:
    """Returns what happened instead of training under the policy.

    Args:
        run: A run whose policy did not take effect.

    Example:
        >>> why_ineffective(RunResult(policy="mixed_float16", lowered=False))
        "no model became a region: everything ran in the script's own formats, as under plain \
Python"
    """
    if "keras" in dict(run.versions):
        return "no layer of a model that trained computes in it: each has a dtype of its own"
    if run.regions:
        return "the script prepares its models with the policy float32, which they keep"
    how = "with the script's own torch.amp" if run.torch_amp else "in the script's own formats"
    return f"{NO_REGION}: everything ran {how}, as under plain Python"
