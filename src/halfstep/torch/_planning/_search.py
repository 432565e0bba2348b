"""The search for a policy: operations propose rules, and whole steps decide."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from halfstep.core import Candidate, Measured, Plan, Policy, Rules
from halfstep.torch._dtypes import COMPUTE
from halfstep.torch._engine._tables import native_rules
from halfstep.torch._machine import machine
from halfstep.torch._planning._proposals import Proposals, proposals
from halfstep.torch._planning._steps import Trial
from halfstep.torch._planning._timing import Spent, alternate, at_a_glance

_FLOAT32 = Policy.named("float32")
_LOW = (Policy.named("mixed_bfloat16"), Policy.named("mixed_float16"))
_FORMATS = tuple(COMPUTE)
# What takes that many times as long as float32 is not looked at any further.
_HOPELESS = 1.5
# What takes that many times as long at the first call is not called again.
_FAR = 5.0
# Steps that differ by less are as fast as each other.
_ALIKE = 0.01
# However noisy the clock is, a policy that was seen to be slower by more is not taken.
_NOISY = 0.05
_SHARE_OF_STEPS = 0.5

Tell = Callable[[str], None]


class Timed(NamedTuple):
    """A policy, and what a step takes and keeps under it.

    Args:
        policy: The policy.
        spent: How long a step takes.
        saved_bytes: What is kept for backward.
    """

    policy: Policy
    spent: Spent
    saved_bytes: int

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        return self.spent.seconds

    @property
    def simplicity(self) -> tuple[int, ...]:
        """What decides between policies that are as fast as each other, the smallest first."""
        rules = self.policy.rules
        own = len(rules.edits) + (rules.base != Rules().base)
        return self.saved_bytes, own, _FORMATS.index(self.policy.compute_dtype)

    def at(self, speed: float) -> "Timed":
        """Returns what it would be at another time, when float32 takes so many times as long."""
        return self._replace(spent=self.spent._replace(seconds=self.seconds * speed))

    @property
    def candidate(self) -> Candidate:
        """What a plan keeps of it."""
        return Candidate(brief(self.policy), *self.spent[:2], self.saved_bytes)


@dataclass(frozen=True)
class Search:
    """Looks for the policy under which a step is fastest.

    Args:
        trial: The step.
        budget: The error that an operation may have.
        seconds: How long the search may take.
        tell: Is told what happens.
    """

    trial: Trial
    budget: float
    seconds: float
    tell: Tell

    def plan(self) -> Plan:
        """Returns the plan."""
        native = self._glanced(self._native())
        hopeful = [each.policy for each in native if each.seconds <= _HOPELESS * native[0].seconds]
        found = [each for low in hopeful if low in _LOW for each in self._proposals(low, hopeful)]
        proposed = [each for some in found for each in some.policies()]
        timed = self._timed([*hopeful, *proposed])
        best = _best(timed)
        drift = timed[0].seconds / native[0].seconds
        hopeless = [each.at(drift) for each in native if each.policy not in hopeful]
        ordered = sorted([*timed, *hopeless], key=lambda each: (each is not best, each.seconds))
        return Plan(
            best.policy,
            machine(self.trial.device_type),
            tuple(each.candidate for each in ordered),
            _measured(found, best.policy),
            datetime.now(UTC).date().isoformat(),
        )

    def _native(self) -> list[Policy]:
        """Returns what anybody would try: the named policies, and PyTorch's own rules."""
        rules = native_rules(self.trial.device_type)
        return [_FLOAT32, *_LOW, *(each.with_(rules=rules) for each in _LOW)]

    def _glanced(self, policies: Sequence[Policy]) -> list[Timed]:
        """Returns about how long a step takes under policies, the first of which is float32."""
        self.tell(f"Looking at {len(policies)} policies")
        found = [self._glance(policies[0])]
        limit = _FAR * found[0].seconds
        for each in policies[1:]:
            try:
                found.append(self._glance(each, limit))
            except RuntimeError as error:  # an operation without a kernel for this format
                self.tell(f"{brief(each)} cannot run: {error}")
        return found

    def _glance(self, policy: Policy, limit: float = math.inf) -> Timed:
        spent = at_a_glance(self.trial.turn(policy), self.trial.device_type, limit)
        return Timed(policy, spent, self.trial.saved_bytes(policy))

    def _timed(self, policies: Iterable[Policy]) -> list[Timed]:
        distinct = list(dict.fromkeys(policies))
        self.tell(f"Timing steps under {len(distinct)} policies")
        turns = [self.trial.turn(each) for each in distinct]
        spent = alternate(turns, self.trial.device_type, _SHARE_OF_STEPS * self.seconds)
        return [
            Timed(each, times, self.trial.saved_bytes(each))
            for each, times in zip(distinct, spent, strict=True)
        ]

    def _proposals(self, policy: Policy, among: Sequence[Policy]) -> Iterator[Proposals]:
        self.tell(f"Timing operations in float32 and {policy.compute_dtype}")
        share = (1 - _SHARE_OF_STEPS) / len(set(among).intersection(_LOW))
        try:
            yield proposals(self.trial, policy, self.budget, share * self.seconds)
        except RuntimeError as error:  # such as of a checkpoint, which sees that it is looked at
            self.tell(f"The operations cannot be timed one by one: {error}")


def _best(timed: Sequence[Timed]) -> Timed:
    """Returns the fastest one; of those that are as fast, the one that keeps least for backward.

    None that keeps more than the fastest of those that anybody would try.
    """
    usual = min((each for each in timed if not each.policy.rules.edits), key=lambda e: e.seconds)
    allowed = [each for each in timed if each.saved_bytes <= usual.saved_bytes]
    fastest = min(allowed, key=lambda each: each.seconds)
    near = [each for each in allowed if each.seconds <= _limit(fastest, each)]
    return min(near, key=lambda each: (each.simplicity, each.seconds))


def _limit(fastest: Timed, other: Timed) -> float:
    """Returns up to which time another policy is as fast as the fastest, for all that is known."""
    noise = fastest.spent.noise + other.spent.noise
    alike, noisy = (share * fastest.seconds for share in (_ALIKE, _NOISY))
    return fastest.seconds + max(alike, min(noise, noisy))


def _measured(found: Iterable[Proposals], policy: Policy) -> tuple[Measured, ...]:
    """Returns what the operations cost in the dtype of a policy."""
    of_its_dtype = (each for each in found if each.lowers_like(policy))
    return next((tuple(each.measured(policy.rules)) for each in of_its_dtype), ())


def brief(policy: Policy) -> str:
    """Returns the text of a policy without the reasons of its rules."""
    edits = tuple(replace(each, reason="Measured.") for each in policy.rules.edits)
    return str(policy.with_(rules=replace(policy.rules, edits=edits)))
