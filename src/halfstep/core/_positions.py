"""Where a key stands in the text of a TOML file."""

import itertools
import re
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

Key = tuple[str | int, ...]

_NUMBER = re.compile(r"[^\W\d]\w*|\[(\d+)\]")


class Position(NamedTuple):
    """A place in a text, counted from 1.

    Example:
        >>> print(Position(3, 1))
        line 3, column 1
    """

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


def position(text: str, key: Key) -> Position | None:
    r"""Returns where the last name of a key is written, None where it is not.

    The place is the one at which another name in the text is another name in the data, so nothing
    but the parser decides what the text means.

    Example:
        >>> text = "\n".join(["[[rules]]", "action = 1", "[[rules]]", "action = 2"])
        >>> position(text, ("rules", 1, "action"))
        Position(line=4, column=1)
    """
    while key and isinstance(key[-1], int):
        key = key[:-1]
    if not key:
        return None
    *parent, name = key
    other = next(each for each in _names() if each not in text)
    for start, end in _written(text, str(name)):
        renamed = f"{text[:start]}{other}{text[end:]}"
        if _has(renamed, (*parent, other)):
            return _at(text, start)
    return None


def parsed(place: str) -> Key:
    """Returns a key of its written form.

    Example:
        >>> parsed("rules[1].action")
        ('rules', 1, 'action')
    """
    return tuple(int(each[1]) if each[1] else each[0] for each in _NUMBER.finditer(place))


def _names() -> Iterator[str]:
    return (f"k{number}" for number in itertools.count())


def _written(text: str, name: str) -> Iterator[tuple[int, int]]:
    quoted = re.escape(name)
    return (each.span() for each in re.finditer(f"\"{quoted}\"|'{quoted}'|{quoted}", text))


def _has(text: str, key: Key) -> bool:
    try:
        value: Any = tomllib.loads(text)
        for part in key:
            value = value[part]
    except (tomllib.TOMLDecodeError, LookupError, TypeError):
        return False
    return True


def _at(text: str, offset: int) -> Position:
    before = text[:offset]
    return Position(before.count("\n") + 1, offset - before.rfind("\n"))
