"""Writes a choice of formats, call by call, as rules: as few as say it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from halfstep.torch._planning._recording import Call, Kind

_ACTIONS = {True: "lower", False: "full"}


class Chosen(NamedTuple):
    """A call, and the format that was chosen for it.

    Args:
        number: The number of the call.
        call: The call.
        kind: Its kind.
        low: Whether it is to run in the low format.
        usual: Whether it does by the rules that there are.
    """

    number: int
    call: Call
    kind: Kind
    low: bool
    usual: bool

    @property
    def operation(self) -> str:
        """The name without the overload."""
        return self.kind.operation.base

    @property
    def group(self) -> str:
        """The family, or the operation where it has none."""
        return self.kind.operation.family or self.operation


class Row(NamedTuple):
    """A rule to be, and the calls that it is about.

    Args:
        target: A family or an operation.
        where: The path of a module; empty for everywhere.
        chosen: The calls.
    """

    target: str
    where: str
    chosen: tuple[Chosen, ...]

    @property
    def action(self) -> str:
        """What the rule says: what most of the calls are to do."""
        lowered = sum(each.low for each in self.chosen)
        return _ACTIONS[2 * lowered > len(self.chosen)]

    @property
    def changed(self) -> list[int]:
        """The numbers of the calls that run differently because of the rule."""
        low = self.action == "lower"
        return [each.number for each in self.chosen if each.usual is not low]


def chosen(calls: Sequence[Call], kinds: Sequence[Kind], low: Sequence[bool]) -> list[Chosen]:
    """Returns the calls that have a choice, with what they are to do and what they would do."""
    return [
        Chosen(number, call, kinds[call.kind], low[number], _usual(kinds[call.kind], call, low))
        for number, call in enumerate(calls)
        if kinds[call.kind].movable
    ]


def _usual(kind: Kind, call: Call, low: Sequence[bool]) -> bool:
    """Returns whether a call runs in the low format by its own rule, if others do as chosen."""
    if kind.action in ("lower", "full"):
        return kind.action == "lower"
    arrives = [each.maker is not None and low[each.maker] for each in call.sources]
    return bool(arrives) and (arrives[0] if kind.action == "keep" else all(arrives))


def rows(calls: Iterable[Chosen]) -> list[Row]:
    """Returns the rules that are needed.

    A family has one where all of it is to run alike, else an operation, else one in a module.
    """
    found = []
    for family in _grouped(calls, lambda each: each.group):
        operations = _grouped(family, lambda each: each.operation)
        alike = [Row(family[0].group, "", tuple(family))]
        found += _needed(alike if _agree(family) else _finer(operations))
    return found


def _finer(operations: list[list[Chosen]]) -> list[Row]:
    found = []
    for calls in operations:
        paths = [calls] if _agree(calls) else _grouped(calls, lambda each: each.call.path)
        where = [""] if _agree(calls) else [some[0].call.path for some in paths]
        found += [
            Row(calls[0].operation, *row) for row in zip(where, map(tuple, paths), strict=True)
        ]
    return found


def _needed(found: list[Row]) -> list[Row]:
    """Returns the rows that change something; all of an operation's if one holds everywhere."""
    changed = [row for row in found if row.changed]
    everywhere = {row.target for row in changed if not row.where}
    return [row for row in found if row.changed or row.target in everywhere]


def _agree(calls: list[Chosen]) -> bool:
    return len({each.low for each in calls}) == 1


def _grouped(calls: Iterable[Chosen], key: Callable[[Chosen], str]) -> list[list[Chosen]]:
    groups: dict[str, list[Chosen]] = defaultdict(list)
    for each in calls:
        groups[key(each)].append(each)
    return list(groups.values())
