"""Which operation runs in which precision, and why."""

import dataclasses
import fnmatch
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.core._text import suggestion
from halfstep.errors import RuleError

ACTIONS = ("lower", "full", "widest", "keep", "refuse")
FAMILIES = (
    "matmul",
    "convolution",
    "attention",
    "recurrent",
    "normalisation",
    "softmax",
    "reduction",
    "exponential",
    "loss",
    "linear_algebra",
    "fourier",
    "pointwise",
    "indexing",
    "masking",
    "embedding",
    "pooling",
    "interpolation",
)


@dataclass(frozen=True)
class Rule:
    """One row of the rules: what happens to an operation or to a family, and why."""

    target: str
    action: str
    reason: str
    where: str = ""
    device: str = ""
    dtype: str = ""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What the row speaks about: two rows of the same key contradict each other."""
        return (self.target, self.where, self.device, self.dtype)


@dataclass(frozen=True)
class Rules:
    """A named, versioned rule set and the edits on top of it."""

    base: str = "halfstep-1"
    edits: tuple[Rule, ...] = ()

    @classmethod
    def named(cls, name: str) -> "Rules":
        """Returns the rule set of that name, without edits."""
        return cls(name)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Returns the names of the rule sets that exist."""
        return _names()

    @property
    def rows(self) -> tuple[Rule, ...]:
        """The rows of the named set, then the edits."""
        return _load(self.base) + self.edits

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
        """Returns rules with one more edit, which replaces an edit about the same thing."""
        rule = Rule(target, action, reason, where, device, dtype)
        edits = {edit.key: edit for edit in self.edits} | {rule.key: rule}
        return dataclasses.replace(self, edits=tuple(edits.values()))

    def without(
        self, target: str, *, where: str = "", device: str = "", dtype: str = ""
    ) -> "Rules":
        """Returns rules without the edit about that target and those limits."""
        key = (target, where, device, dtype)
        return dataclasses.replace(self, edits=tuple(e for e in self.edits if e.key != key))

    def find(
        self, operation: str, family: str = "", *, path: str = "", device: str = "", dtype: str = ""
    ) -> Rule | None:
        """Returns the rule that decides about an operation, or None where none speaks of it."""
        targets = [family, operation.partition(".")[0], operation]
        rows = [(False, rule) for rule in _load(self.base)] + [(True, rule) for rule in self.edits]
        best: tuple[Any, ...] = ()
        found: Rule | None = None
        for edit, rule in rows:
            if (
                rule.target not in targets
                or (rule.where and not fnmatch.fnmatchcase(path, rule.where))
                or rule.device not in ("", device)
                or rule.dtype not in ("", dtype)
            ):
                continue
            rank = (
                edit,
                bool(rule.where),
                bool(rule.device) + bool(rule.dtype),
                "::" in rule.target,
                "." in rule.target,
            )
            if rank == best and found and found.action != rule.action:
                raise RuleError(f"{found} and {rule} overlap for {operation}.")
            if rank >= best:
                best, found = rank, rule
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns the rules as plain data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Rules":
        """Returns the rules of a dict that `to_dict` made."""
        return cls(data["base"], tuple(Rule(**row) for row in data["edits"]))

    @classmethod
    def parse(cls, text: str) -> "Rules":
        """Reads a name, followed by edits such as `halfstep-1 + softmax=full`."""
        base, *edits = (piece.strip() for piece in text.split("+"))
        rows = []
        for edit in edits:
            target, _, action = edit.partition("=")
            rows.append(Rule(target.strip(), action.strip(), "Asked for in the text of the rules."))
        if base not in _names():
            raise RuleError(
                f"Rules needs one of {', '.join(_names())}, got {base!r}."
                f"{suggestion(base, _names())}"
            )
        return cls(base, tuple(rows))

    def __str__(self) -> str:
        return " + ".join([self.base, *(f"{edit.target}={edit.action}" for edit in self.edits)])


_FOLDER = Path(__file__).with_name("rulesets")


@functools.cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(["none", *(path.stem for path in _FOLDER.glob("*.toml"))]))


@functools.cache
def _load(name: str) -> tuple[Rule, ...]:
    import tomllib

    if name == "none":
        return ()
    data = tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))
    rows = []
    for table in data["rules"]:
        limits = {key: table[key] for key in ("where", "device", "dtype") if key in table}
        for target in [*table.get("families", ()), *table.get("operations", ())]:
            rows.append(Rule(target, table["action"], table["reason"], **limits))
    return tuple(rows)
