"""What remedies change, so that several of them are written as one text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from halfstep.core._pasting import complete, policy_text, quoted, rules_text
from halfstep.core._policy import Policy
from halfstep.core._rule import Rule
from halfstep.core._rules import Rules

LATER = "only after that, for it contradicts it: "
_IMPORT = re.compile(r"(?:import|from) \w")


@dataclass(frozen=True)
class Change:
    """What one thing is to be, in place of what it is.

    Args:
        use: The line by which it takes effect. `policy` and `rules` are set above it if it reads
            them.
        of: What is changed, such as "policy" or "scaler"; with an asterisk, whichever there is that
            begins so; empty for a line that goes beside all others.
        base: The text of the policy in force; empty where `use` reads none.
        instead: The text of a policy that takes its place, empty where it is only changed.
        scale: The text of the loss scale, empty for the one in force.
        rules: Rows on top of the rules in force.

    Example:
        >>> rule = Rule("softmax", "full", "It sums.", where="head")
        >>> change = Change("set_global_policy(policy)", "policy", "mixed_float16", rules=(rule,))
        >>> print(written([change]))
        from halfstep import Policy, Rules
        from halfstep.torch import set_global_policy
        rules = Rules().with_rule("softmax", "full", reason="It sums.", where="head")
        policy = Policy.named("mixed_float16").with_(rules=rules)
        set_global_policy(policy)
    """

    use: str
    of: str = ""
    base: str = ""
    instead: str = ""
    scale: str = ""
    rules: tuple[Rule, ...] = ()

    @property
    def text(self) -> str:
        """The lines to write, without imports.

        Example:
            >>> print(Change("region = prepare(model, policy=policy)", instead="float32").text)
            policy = "float32"
            region = prepare(model, policy=policy)
        """
        policy, lines = Policy.parse(self.base) if self.base else Policy(), []
        if self.rules:
            lines.append(rules_text(policy.rules, self.rules))
        if "(policy" in self.use or "=policy" in self.use:
            lines.append(f"policy = {self._policy_text(policy)}")
        return "\n".join([*lines, self.use])

    def _policy_text(self, policy: Policy) -> str:
        if self.instead:
            return quoted(self.instead)
        scaled = policy.with_(scale=self.scale) if self.scale else policy
        if not self.rules:
            return policy_text(scaled)
        return f"{policy_text(scaled.with_(rules=Rules()))}.with_(rules=rules)"

    def also(self, other: "Change") -> "Change | None":
        """Returns both as one, None where they contradict each other.

        Args:
            other: A change of the same thing.

        Example:
            >>> low, high = (Change("scaler = GradScaler(...)", "scaler", scale=s) for s in "12")
            >>> low.also(low) == low, low.also(high)
            (True, None)
        """
        if self == other or (self.instead and self.instead == other.instead):
            return self
        if self.instead or other.instead or (self.scale and other.scale not in ("", self.scale)):
            return None
        known = {each.key: each for each in self.rules}
        if any(known.get(each.key, each).action != each.action for each in other.rules):
            return None
        rules = tuple(({each.key: each for each in other.rules} | known).values())
        rules = (*self.rules, *(each for each in rules if each.key not in known))
        use = self.use if self.rules or not other.rules else other.use
        told = replace(self, use=use, scale=self.scale or other.scale, rules=rules)
        return told if rules or told.scale else None


class Together(NamedTuple):
    """Several remedies as one.

    Args:
        text: What to write.
        later: Against what the remedies are that contradict one before them, and are left out.

    Example:
        >>> Together("scaler = GradScaler()", ()).later
        ()
    """

    text: str
    later: tuple[str, ...]


def written(changes: Iterable[Change]) -> str:
    """Returns changes as a text below the imports that it needs.

    Example:
        >>> written([])
        ''
    """
    lines = [line for each in changes for line in each.text.splitlines()]
    own = [line for line in dict.fromkeys(lines) if _IMPORT.match(line)]
    known = complete("\n".join(line for line in lines if not _IMPORT.match(line)))
    return "\n".join([*(line for line in own if line not in known.splitlines()), known]).strip("\n")


def changes_of(told: Any) -> tuple[Change, ...]:
    """Returns what a fault or a finding changes; its remedy alone goes beside all others.

    Args:
        told: The fault or the finding.

    Example:
        >>> from halfstep.core import Finding
        >>> [each.use for each in changes_of(Finding("note", "So.", remedy="x = 1"))]
        ['x = 1']
    """
    return told.changes or ((Change(told.remedy),) if told.remedy else ())


def together(remedies: Iterable[tuple[str, tuple[Change, ...]]]) -> Together:
    """Returns several remedies as one, the first ones first.

    One that sets otherwise what a remedy before it sets is left out as a whole.

    Args:
        remedies: What each is against, and what it changes.

    Example:
        >>> low, high = (Change(f"scaler = GradScaler(init_scale={s})", "scaler") for s in "12")
        >>> found = together([("Inf.", (low,)), ("Zeros.", (high,))])
        >>> found.text.splitlines()[-1], found.later
        ('scaler = GradScaler(init_scale=1)', ('Zeros.',))
    """
    taken: tuple[Change, ...] = ()
    later: list[str] = []
    for against, changes in remedies:
        joint = _joint(taken, changes)
        later += [against] if joint is None else []
        taken = taken if joint is None else joint
    return Together(written(taken), tuple(dict.fromkeys(later)))


def _joint(taken: tuple[Change, ...], remedy: Sequence[Change]) -> tuple[Change, ...] | None:
    """Returns what is taken with another remedy, None where they contradict each other."""
    for each in remedy:
        place = next((i for i, one in enumerate(taken) if _is_same(one, each)), len(taken))
        joint = taken[place].also(each) if place < len(taken) else each
        if joint is None:
            return None
        taken = (*taken[:place], joint, *taken[place + 1 :])
    return taken


def _is_same(one: Change, other: Change) -> bool:
    """Returns whether two changes are of the same thing."""
    if not (one.of and other.of):
        return one == other
    pairs = ((one.of, other.of), (other.of, one.of))
    whichever = any(of.endswith("*") and known.startswith(of[:-1]) for of, known in pairs)
    return one.of == other.of or whichever
