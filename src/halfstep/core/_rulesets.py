"""The named rule sets, which are data files beside this one."""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.core import _fields
from halfstep.core._rule import Rule
from halfstep.core._text import suggestion
from halfstep.errors import RuleError

_FOLDER = Path(__file__).with_name("rulesets")


@dataclass(frozen=True)
class RuleSet:
    """A named table of rules. A released set never changes; a new one gets a new name."""

    name: str
    description: str
    rows: tuple[Rule, ...]


@functools.cache
def names() -> tuple[str, ...]:
    """Returns the names of the rule sets that exist."""
    return tuple(sorted(["none", *(path.stem for path in _FOLDER.glob("*.toml"))]))


def check(name: str) -> None:
    """Raises an error unless there is a rule set of that name."""
    if not isinstance(name, str) or name not in names():
        raise RuleError(
            f"Rules needs a rule set among {', '.join(names())}, got {name!r}."
            f"{suggestion(name, names())}"
        )


@functools.cache
def load(name: str) -> RuleSet:
    """Returns the rule set of that name, read once per process."""
    if name == "none":
        return RuleSet("none", "No rules: every operation runs in whatever arrives.", ())
    check(name)
    data = tomllib.loads((_FOLDER / f"{name}.toml").read_text("utf-8"))
    rows = tuple(rule for table in data["rules"] for rule in _rows(table))
    return RuleSet(data["name"], data["description"], rows)


def _rows(table: dict[str, Any]) -> list[Rule]:
    targets = [*table.get("families", ()), *table.get("operations", ())]
    shared = {key: table[key] for key in _fields.names(Rule) if key in table}
    return [Rule(target=target, **shared) for target in targets]
