"""A plan, for a person."""

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from halfstep.core import Candidate, Plan, Policy, Rule
from halfstep.report._numbers import bytes_text, ratio_text
from halfstep.report._table import FittingTable, Row

# Steps that differ by less are as fast as each other.
_ALIKE = 0.02


@dataclass(frozen=True)
class PlanText:
    """What was timed, what was chosen, and the rules that it has.

    Args:
        plan: The plan.
        path: Where it was written.

    Example:
        >>> from halfstep.core import Machine
        >>> plan = Plan(Policy.named("float32"), Machine("cpu", "AMD EPYC"))
        >>> Console(width=60).print(PlanText(plan, "plan.toml"))
        No gain here: nothing is faster than float32 on AMD EPYC.
        halfstep: wrote plan.toml
    """

    plan: Plan
    path: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the table, the rules and the verdict."""
        plan = self.plan
        if plan.candidates:
            yield FittingTable("policy", [_row(each, plan) for each in plan.candidates])
            yield ""
        for each in plan.policy.rules.edits:
            yield Text(f"  {_rule_text(each)}")
        yield Text(verdict(plan), style="bold")
        yield Text(f"halfstep: wrote {self.path}")


def verdict(plan: Plan) -> str:
    """Returns what a plan brings, in a sentence.

    Example:
        >>> from halfstep.core import Machine
        >>> policy, here = Policy.named("mixed_bfloat16"), Machine("cpu", "AMD EPYC")
        >>> low, wide = Candidate(str(policy), 0.01, 0.0, 50), Candidate("float32", 0.015, 0.0, 100)
        >>> verdict(Plan(policy, here, (low, wide)))
        'mixed_bfloat16: 1.50x as fast as float32 on AMD EPYC, 50 % of the activation memory.'
    """
    name, where = policy_name(plan.policy), plan.machine.name
    if plan.policy.compute_dtype == "float32":
        return f"No gain here: nothing is faster than float32 on {where}."
    if plan.speedup is None:
        return f"{name}: not timed against float32."
    memory = "" if plan.saved is None else f", {plan.saved:.0%} of the activation memory"
    memory = memory.replace("%", " %")
    if abs(plan.speedup - 1) < _ALIKE:
        return f"{name}: as fast as float32 on {where}{memory}."
    return f"{name}: {plan.speedup:.2f}x as fast as float32 on {where}{memory}."


def policy_name(policy: Policy) -> str:
    """Returns a policy's name and how many rules it has of its own.

    Example:
        >>> policy_name(Policy.parse("mixed_bfloat16, rules=torch-2.13 + softmax=full"))
        'mixed_bfloat16, torch-2.13, 1 rule'
    """
    base = Policy().rules
    named = [n for n in Policy.names() if Policy.named(n) == policy.with_(rules=base)]
    count = len(policy.rules.edits)
    rules = f"{count} rule{'s' * (count != 1)}" if count else ""
    own_set = policy.rules.base if policy.rules.base != base.base else ""
    return ", ".join(filter(None, [*(named or [policy.compute_dtype]), own_set, rules]))


def _row(candidate: Candidate, plan: Plan) -> Row:
    wide = next((e.seconds for e in plan.candidates if e.policy == "float32"), None)
    cells = {
        "step": f"{candidate.seconds * 1e3:.2f} ms",
        "spread": f"{candidate.spread * 1e3:.2f} ms",
        "speed": ratio_text(wide, candidate.seconds),
        "kept for backward": bytes_text(candidate.saved_bytes),
    }
    chosen = "* " if candidate is plan.candidates[0] else ""
    return Row(chosen + policy_name(Policy.parse(candidate.policy)), cells)


def _rule_text(rule: Rule) -> str:
    where = f" in {rule.where}" if rule.where else ""
    return f"{rule.target}{where}: {rule.action}. {rule.reason}"
