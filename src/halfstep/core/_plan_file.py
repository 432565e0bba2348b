"""Plans as text: TOML that a person reads and edits, and errors that say in which line."""

import contextlib
import itertools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tomli_w

from halfstep.core import _fields
from halfstep.core._evidence import Candidate, Machine, Measured
from halfstep.core._policy import Policy
from halfstep.core._positions import Key, parsed, position
from halfstep.core._reading import record
from halfstep.core._rule import Rule
from halfstep.core._rules import Rules
from halfstep.core._text import suggestion
from halfstep.errors import HalfstepError, PlanError, ReportError

_COMMENT = """\
# A plan of halfstep: policy and rules are what it does, and yours to edit.

"""
_TABLES = ("policy", "rules", "machine", "candidates", "measured", "made")
_EXAMPLE = {"target": "softmax", "action": "full", "reason": "It sums."}


class _Wrong(Exception):
    """Something that cannot be read, and its key."""

    def __init__(self, text: object, key: Key) -> None:
        super().__init__(str(text))
        self.key = key


def write(policy: Policy, evidence: Mapping[str, Any]) -> str:
    """Returns the text of a plan.

    Args:
        policy: The policy.
        evidence: What was measured, as plain data.
    """
    fields = {name: str(getattr(policy, name)) for name in _fields.names(policy)}
    rules = [{k: v for k, v in each.to_dict().items() if v} for each in policy.rules.edits]
    tables: dict[str, Any] = {"policy": {**fields, "rules": policy.rules.base}, "rules": rules}
    tables |= {name: evidence[name] for name in ("machine", "candidates", "measured")}
    made = tomli_w.dumps({"made": evidence["made"]}) if evidence["made"] else ""
    return _COMMENT + "\n".join(filter(None, (made, *itertools.starmap(_written, tables.items()))))


def _written(name: str, value: Any) -> str:
    if isinstance(value, dict):
        return f"[{name}]\n{tomli_w.dumps(value)}"
    return "\n".join(f"[[{name}]]\n{tomli_w.dumps(each)}" for each in value)


def read(text: str, name: str) -> dict[str, Any]:
    """Returns the policy of a text and what was measured, as the values that they are.

    Args:
        text: The text.
        name: What errors call it.

    Raises:
        PlanError: The text is not a plan.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{name} needs to be TOML. {error}.") from None
    except RecursionError:
        raise PlanError(f"{name} needs to be TOML of a plan, got one nested too deep.") from None
    try:
        return _values(data)
    except _Wrong as wrong:
        where = position(text, wrong.key)
        raise PlanError(f"{name}{f', {where}' if where else ''}: {wrong}") from None


def read_plain(cls: Any, data: Any) -> dict[str, Any]:
    """Returns the values of plain data, in which the policy is its text.

    Args:
        cls: The class whose fields they are.
        data: What `Plan.to_dict` made.

    Raises:
        PlanError: It is not that.
    """
    checked = _fields.checked(cls, data, PlanError)
    try:
        return {**_evidence(checked), "policy": Policy.of(checked["policy"])}
    except _Wrong as wrong:
        raise PlanError(str(wrong)) from None


def _values(data: dict[str, Any]) -> dict[str, Any]:
    _check_keys(data, _TABLES, ())
    return {"machine": Machine("", ""), **_evidence(data), "policy": _policy(data)}


def _evidence(data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: read_part(data[name]) for name, read_part in _EVIDENCE.items() if name in data}


def _policy(data: dict[str, Any]) -> Policy:
    given, rows = data.get("policy"), data.get("rules", [])
    if not isinstance(given, dict):
        raise _Wrong(f"A plan needs a table [policy], got {_kind(given)}.", ("policy",))
    _check_keys(given, _fields.names(Policy), ("policy",))
    if not given:
        text = 'A plan needs keys in [policy], got none. Write compute_dtype = "bfloat16".'
        raise _Wrong(text, ("policy",))
    policy = Policy()
    for key, value in given.items():
        with _at("policy", key):
            policy = policy.with_(**{key: value})
    if not isinstance(rows, list):
        raise _Wrong(f"A plan needs rules to be tables [[rules]], got {_kind(rows)}.", ("rules",))
    edits = {each.key: each for each in policy.rules.edits}
    for index, row in enumerate(rows):
        rule = _rule(row, index, edits)
        edits[rule.key] = rule
    return policy.with_(rules=Rules(policy.rules.base, tuple(edits.values())))


def _rule(row: Any, index: int, before: Mapping[tuple[str, ...], Rule]) -> Rule:
    """Returns the rule of a row, which contradicts none before it."""
    if not isinstance(row, dict):
        raise _Wrong(f"A rule needs to be a table [[rules]], got {_kind(row)}.", ("rules",))
    _check_keys(row, _fields.names(Rule), ("rules", index))
    for key, value in row.items():
        with _at("rules", index, key):
            Rule.from_dict({**_EXAMPLE, key: value})
    with _at("rules", index, next(iter(row), "")):
        rule = Rule.from_dict(row)
        Rules(edits=tuple(filter(None, (before.get(rule.key), rule))))
    return rule


def _check_keys(table: Mapping[str, Any], known: Sequence[str], key: Key) -> None:
    for name in table:
        if name not in known:
            raise _Wrong(
                f"{_title(key)} needs keys among {', '.join(known)}, got {name!r}."
                f"{suggestion(name, known)}",
                (*key, name),
            )


def _title(key: Key) -> str:
    return f"[{key[0]}]" if key else "A plan"


def _kind(value: Any) -> str:
    return "nothing" if value is None else repr(value)


@contextlib.contextmanager
def _at(*key: str | int) -> Iterator[None]:
    """Tells of what is wrong in the block that it is so at a key."""
    try:
        yield
    except HalfstepError as error:
        raise _Wrong(error, key) from None


def _table(cls: Any, name: str) -> Callable[[Any], Any]:
    return lambda data: _record(cls, data, name)


def _tables(cls: Any, name: str) -> Callable[[Any], Any]:
    def read_all(data: Any) -> Any:
        if not isinstance(data, list):
            raise _Wrong(f"A plan needs tables [[{name}]], got {data!r}.", (name,))
        return tuple(_record(cls, each, f"{name}[{index}]") for index, each in enumerate(data))

    return read_all


def _record(cls: Any, data: Any, where: str) -> Any:
    try:
        return record(cls, data, where)
    except ReportError as error:
        raise _Wrong(error, _named(parsed(error.place), data)) from None


def _named(key: Key, data: Any) -> Key:
    """Returns a key of which there is a name in the text: a table in a list has none."""
    first = next(iter(data), "") if isinstance(data, dict) else ""
    return (*key, first) if first and isinstance(key[-1], int) else key


def _date(data: Any) -> str:
    if not isinstance(data, str):
        raise _Wrong(f"A plan needs made to be a text, got {data!r}.", ("made",))
    return data


_EVIDENCE: dict[str, Callable[[Any], Any]] = {
    "machine": _table(Machine, "machine"),
    "candidates": _tables(Candidate, "candidates"),
    "measured": _tables(Measured, "measured"),
    "made": _date,
}
