"""Rules that may make a step faster, found from what its operations cost one by one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.core import Measured, Policy, Rules
from halfstep.torch._dtypes import COMPUTE
from halfstep.torch._planning._casts import Casting
from halfstep.torch._planning._choice import Costed
from halfstep.torch._planning._costs import Cost, costs
from halfstep.torch._planning._recording import recorded
from halfstep.torch._planning._rules import Row, chosen, rows
from halfstep.torch._planning._steps import Trial

# How much of a step a rule has to save, so that it is worth to be there.
_WORTH = 0.005
# What it may be worth not to keep a byte for backward, in times that it takes to write one.
_WEIGHTS_OF_BYTES = (0.0, 0.5, 2.0)
_SHARE_OF_CASTS = 0.1


@dataclass(frozen=True)
class Proposals:
    """What the operations of a step cost, and the rules that follow from it.

    Args:
        policy: The policy that is improved.
        costed: What the operations cost.
        per_byte: The seconds that it takes to write a byte.
    """

    policy: Policy
    costed: Costed
    per_byte: float

    def lowers_like(self, policy: Policy) -> bool:
        """Returns whether this is about what a policy computes in."""
        return self.policy.compute_dtype == policy.compute_dtype

    def policies(self) -> Iterator[Policy]:
        """Yields the policy with the rules that make the step cheapest, for several tastes."""
        for weight in _WEIGHTS_OF_BYTES:
            yield self._improved(weight * self.per_byte)

    def _improved(self, per_byte: float) -> Policy:
        low = self.costed.lowered(per_byte)
        least, rules = _WORTH * self.costed.total(low, per_byte), self.policy.rules
        for row in rows(chosen(self.costed.calls, self.costed.kinds, low)):
            gain = self._gain(row, low, per_byte)
            if gain >= least:
                rules = rules.with_rule(
                    row.target, row.action, reason=self._reason(row), where=row.where
                )
        return self.policy.with_(rules=rules)

    def _gain(self, row: Row, low: Sequence[bool], per_byte: float) -> float:
        """Returns by how much the step would cost more without a rule."""
        changed = set(row.changed)
        without = [is_low is not (number in changed) for number, is_low in enumerate(low)]
        return self.costed.total(without, per_byte) - self.costed.total(low, per_byte)

    def _reason(self, row: Row) -> str:
        pairs = [self.costed.costs[each.call.kind] for each in row.chosen]
        wide, low = (sum(cost[place].seconds for cost in pairs if cost) for place in (0, 1))
        calls = f"{len(row.chosen)} calls take" if len(row.chosen) > 1 else "1 call takes"
        return (
            f"Measured: {calls} {wide * 1e3:.3f} ms in float32 and {low * 1e3:.3f} ms in "
            f"{self.policy.compute_dtype}, casts apart."
        )

    def measured(self, rules: Rules) -> list[Measured]:
        """Returns what each kind of operation costs, and what it runs in by rules; longest first.

        Args:
            rules: The rules of a policy in the same dtype.
        """
        costs = enumerate(self.costed.costs)
        found = [self._measured(kind, each, rules) for kind, each in costs if each is not None]
        return sorted(found, key=lambda each: -each.float32_seconds * each.count)

    def _measured(self, number: int, costs: tuple[Cost, Cost], rules: Rules) -> Measured:
        calls = [each for each in self.costed.calls if each.kind == number]
        kind, (wide, low) = self.costed.kinds[number], costs
        rule = rules.find(kind.operation.name, kind.operation.family, path=calls[0].path)
        return Measured(
            operation=kind.operation.base,
            module=calls[0].path,
            inputs=" ".join("x".join(map(str, each.shape)) for each in calls[0].sources),
            count=len(calls),
            rule="" if rule is None else rule.action,
            float32_seconds=wide.seconds,
            low_seconds=low.seconds,
            low_error=low.error,
        )


def proposals(trial: Trial, policy: Policy, budget: float, seconds: float) -> Proposals:
    """Returns what the operations of a step cost under a policy.

    Args:
        trial: The step.
        policy: The policy.
        budget: The error that an operation may have.
        seconds: How long measuring may take.
    """
    recorder, low = recorded(trial, policy), COMPUTE[policy.compute_dtype]
    movable = sum(each.movable for each in recorder.kinds)
    share = (1 - _SHARE_OF_CASTS) * seconds / max(movable, 1)
    found = [
        costs(each, trial.device_type, low, share) if each.movable else None
        for each in recorder.kinds
    ]
    cast = Casting.on(trial.device_type, low, _SHARE_OF_CASTS * seconds)
    costed = Costed(recorder.calls, recorder.kinds, found, cast, budget)
    return Proposals(policy, costed, cast.per_byte)
