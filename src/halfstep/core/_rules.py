"""Which operation runs in which precision, and why."""

import dataclasses
import fnmatch
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.core import _fields, _grammar, _rulesets
from halfstep.core._rule import FAMILIES, Rule
from halfstep.core._text import suggestion
from halfstep.errors import RuleError


@dataclass(frozen=True)
class Rules:
    """A named, versioned rule set and the edits on top of it.

    Where several rows speak about an operation, an edit beats a row of the set, then a row limited
    by `where` beats one that is not, then the row with more limits by device and dtype wins, then
    an overload beats an operation, and an operation beats a family.

    Args:
        base: The name of the rule set; "none" is the empty one.
        edits: The rows on top of it.

    Example:
        >>> rules = Rules.parse('halfstep-1 + softmax=full "Small probabilities matter here."')
        >>> rules.find("aten::softmax.int", "softmax").action
        'full'
        >>> Rules().find("aten::softmax.int", "softmax").action
        'keep'
    """

    base: str = "halfstep-1"
    edits: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        _rulesets.check(self.base)
        object.__setattr__(self, "edits", _checked_edits(self.edits))

    @classmethod
    def named(cls, name: str) -> "Rules":
        """Returns the rule set of that name, without edits.

        Example:
            >>> Rules.named("torch-2.13").find("aten::mm").action
            'lower'
        """
        return cls(name)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Returns the names of the rule sets that exist.

        Example:
            >>> "torch-2.13" in Rules.names()
            True
        """
        return _rulesets.names()

    @property
    def description(self) -> str:
        """What the named set is for.

        Example:
            >>> Rules.named("none").description
            'No rules: every operation runs in whatever arrives.'
        """
        return _rulesets.load(self.base).description

    @property
    def rows(self) -> tuple[Rule, ...]:
        """The rows of the named set, then the edits.

        Example:
            >>> Rules.parse("none + softmax=full").rows[0].target
            'softmax'
        """
        return _rulesets.load(self.base).rows + self.edits

    def with_rule(
        self,
        target: str,
        action: str,
        *,
        reason: str,
        where: str = "",
        device: str = "",
        dtype: str = "",
    ) -> "Rules":
        """Returns rules with one more edit; it replaces an edit of the same target and limits.

        Example:
            >>> rules = Rules().with_rule("aten::exp", "keep", reason="Inputs are below 1.")
            >>> str(rules)
            'halfstep-1 + aten::exp=keep "Inputs are below 1."'
        """
        rule = Rule(target, action, reason, where, device, dtype)
        edits = {edit.key: edit for edit in self.edits} | {rule.key: rule}
        return dataclasses.replace(self, edits=tuple(edits.values()))

    def without(
        self, target: str, *, where: str = "", device: str = "", dtype: str = ""
    ) -> "Rules":
        """Returns rules without the edit of that target and those limits.

        Example:
            >>> str(Rules.parse("halfstep-1 + softmax=full").without("softmax"))
            'halfstep-1'
        """
        left = tuple(e for e in self.edits if e.key != (target, where, device, dtype))
        if len(left) == len(self.edits):
            known = ", ".join(_grammar.write_edit(edit) for edit in self.edits) or "no edits"
            raise RuleError(
                f"Rules needs an edit of {target!r} with exactly these limits to remove, got"
                f" {known}. A row of the set {self.base!r} is overruled by with_rule(...)."
            )
        return dataclasses.replace(self, edits=left)

    def find(
        self, operation: str, family: str = "", *, path: str = "", device: str = "", dtype: str = ""
    ) -> Rule | None:
        """Returns the rule that decides about an operation, or None where none speaks of it.

        Args:
            operation: Its name with namespace, such as "aten::softmax.int".
            family: The family that it belongs to, if any.
            path: The dotted path of the module in which it runs.
            device: The device type on which it runs.
            dtype: The compute dtype.

        Example:
            >>> rules = Rules.parse("none + softmax=full + softmax[where=head*]=keep")
            >>> rules.find("aten::softmax", "softmax", path="head.out").action
            'keep'
            >>> rules.find("aten::add") is None
            True
        """
        targets = _targets(operation, family)
        table = _by_target(self.base, self.edits)
        ranked = [
            entry
            for target in targets
            for entry in table.get(target, ())
            if _applies(entry[1], path, device, dtype)
        ]
        if not ranked:
            return None
        highest = max(rank for rank, _ in ranked)
        return _only([rule for rank, rule in ranked if rank == highest], operation, path)

    def to_dict(self) -> dict[str, Any]:
        """Returns the rules as plain data.

        Example:
            >>> Rules().to_dict()
            {'base': 'halfstep-1', 'edits': []}
        """
        return _fields.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Rules":
        """Returns the rules of a dict that `to_dict` made.

        Example:
            >>> Rules.from_dict({"base": "none"}) == Rules.named("none")
            True
        """
        checked = _fields.checked(cls, data, RuleError)
        rows = checked.get("edits", ())
        if not isinstance(rows, (list, tuple)):
            raise RuleError(f"Rules needs a list of edits, got {rows!r}. Write a list of dicts.")
        return cls(**checked | {"edits": tuple(Rule.from_dict(row) for row in rows)})

    @classmethod
    def of(cls, value: object) -> "Rules":
        """Returns rules as they are, or reads their text or dict form.

        Example:
            >>> Rules.of("none") == Rules.of(Rules("none"))
            True
        """
        return _fields.of(cls, value, RuleError)

    @classmethod
    def parse(cls, text: str) -> "Rules":
        """Reads the name of a set, followed by edits.

        Args:
            text: Such as `halfstep-1 + softmax[where=head* device=cpu]=full "reason"`. Values that
                are no plain words are JSON strings; the reason may be left out.

        Example:
            >>> Rules.parse("torch-2.13 + aten::exp=keep").edits[0].target
            'aten::exp'
        """
        return cls(*_grammar.read(text))

    def __str__(self) -> str:
        return _grammar.write(self.base, self.edits)


Ranked = tuple[tuple[int, ...], Rule]


def _checked_edits(edits: Iterable[Rule]) -> tuple[Rule, ...]:
    seen: dict[tuple[str, ...], Rule] = {}
    for edit in edits:
        if not isinstance(edit, Rule):
            raise RuleError(f"Rules needs edits that are a Rule, got {edit!r}. Write Rule(...).")
        if edit.key in seen:
            raise RuleError(
                f"Rules needs one edit per target and limits, got {_grammar.write_edit(edit)!r}"
                f" after {_grammar.write_edit(seen[edit.key])!r}. Remove one of them."
            )
        seen[edit.key] = edit
    return tuple(seen.values())


@functools.lru_cache(maxsize=256)
def _by_target(base: str, edits: tuple[Rule, ...]) -> dict[str, list[Ranked]]:
    table: dict[str, list[Ranked]] = {}
    for is_edit, rows in ((0, _rulesets.load(base).rows), (1, edits)):
        for rule in rows:
            table.setdefault(rule.target, []).append((_rank(is_edit, rule), rule))
    return table


def _rank(is_edit: int, rule: Rule) -> tuple[int, ...]:
    limits = bool(rule.device) + bool(rule.dtype)
    return (is_edit, bool(rule.where), limits, "::" in rule.target, "." in rule.target)


def _targets(operation: str, family: str) -> list[str]:
    if "::" not in operation:
        raise RuleError(
            f"Rules needs an operation with its namespace, got {operation!r}."
            f" Write for example 'aten::{operation}'."
        )
    if family and family not in FAMILIES:
        raise RuleError(
            f"Rules needs a family among {', '.join(FAMILIES)}, got {family!r}."
            f"{suggestion(family, FAMILIES)}"
        )
    name = operation.partition(".")[0]
    return list(dict.fromkeys(target for target in (operation, name, family) if target))


def _applies(rule: Rule, path: str, device: str, dtype: str) -> bool:
    return (
        (not rule.where or fnmatch.fnmatchcase(path, rule.where))
        and rule.device in ("", device)
        and rule.dtype in ("", dtype)
    )


def _only(rules: list[Rule], operation: str, path: str) -> Rule:
    """Returns the last of equally ranked rules, which must agree."""
    for other in rules:
        if other.action != rules[-1].action:
            both = f"{_grammar.write_edit(other)!r} and {_grammar.write_edit(rules[-1])!r}"
            raise RuleError(
                f"Rules needs one action for {operation!r} at {path!r}, got {both}, which overlap."
                " Remove one of them, or limit one of them further."
            )
    return rules[-1]
