"""The text form of rules.

    rules = base { "+" edit }
    edit  = target [ "[" limit { limit } "]" ] "=" action [ reason ]
    limit = ( "where" | "device" | "dtype" ) "=" value

A value is a bare word or a JSON string, a reason is a JSON string.
"""

import json
import re
from collections.abc import Iterable
from typing import NoReturn

from halfstep.core import _fields
from halfstep.core._rule import Rule
from halfstep.core._text import suggestion
from halfstep.errors import RuleError

UNSTATED_REASON = "Asked for in the text of the rules."

LIMITS = tuple(name for name in _fields.names(Rule) if name not in _fields.required(Rule))

_WORD = re.compile(r'[^\s"+=\[\](),]+')
_TOKEN = re.compile(rf'\s*({_WORD.pattern}|"(?:[^"\\]|\\.)*"|\S)', re.DOTALL)


def write(base: str, edits: Iterable[Rule]) -> str:
    """Returns the text form that `read` turns back into the same base and edits."""
    return " + ".join([base, *(write_edit(edit) for edit in edits)])


def write_edit(rule: Rule) -> str:
    """Returns the text form of one edit.

    Example:
        >>> write_edit(Rule("softmax", "full", "It sums.", where="decoder.*", device="cpu"))
        'softmax[where=decoder.* device=cpu]=full "It sums."'
    """
    limits = " ".join(f"{key}={_quote(value)}" for key, value in limits_of(rule).items())
    reason = "" if rule.reason == UNSTATED_REASON else f" {json.dumps(rule.reason)}"
    return f"{rule.target}{f'[{limits}]' if limits else ''}={rule.action}{reason}"


def limits_of(rule: Rule) -> dict[str, str]:
    """Returns the limits that a rule has.

    Example:
        >>> limits_of(Rule("softmax", "full", "It sums.", device="cpu"))
        {'device': 'cpu'}
    """
    return {key: getattr(rule, key) for key in LIMITS if getattr(rule, key)}


def _quote(value: str) -> str:
    return value if _WORD.fullmatch(value) else json.dumps(value)


def read(text: str) -> tuple[str, tuple[Rule, ...]]:
    """Returns the base and the edits of a text.

    Example:
        >>> read("none + softmax=full")[1][0].action
        'full'
    """
    if not isinstance(text, str):
        raise RuleError(f"Rules needs a text, got {text!r}. Write 'halfstep-1'.")
    reader = _Reader(text)
    base = reader.word("the name of a rule set")
    edits = []
    while not reader.at_end():
        reader.symbol("+", "before the next edit")
        edits.append(_read_edit(reader))
    return base, tuple(edits)


def _read_edit(reader: "_Reader") -> Rule:
    target = reader.word("a family or an operation")
    limits = _read_limits(reader) if reader.accept("[") else {}
    reader.symbol("=", f"after {target!r}")
    action = reader.word("an action")
    reason = reader.value("a reason") if reader.peek().startswith('"') else UNSTATED_REASON
    return Rule(target, action, reason, **limits)


def _read_limits(reader: "_Reader") -> dict[str, str]:
    limits: dict[str, str] = {}
    while not reader.accept("]"):
        key = reader.word("a limit")
        if key not in LIMITS:
            reader.fail(f"a limit among {', '.join(LIMITS)}", key, suggestion(key, LIMITS))
        if key in limits:
            reader.fail("each limit once", key, " Remove the second one.")
        reader.symbol("=", f"after {key!r}")
        limits[key] = reader.value(f"a value for {key!r}")
    return limits


class _Reader:
    """The tokens of a text, taken one after the other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _TOKEN.findall(text)[::-1]

    def at_end(self) -> bool:
        """Returns whether every token was taken."""
        return not self._tokens

    def peek(self) -> str:
        """Returns the next token, which stays; empty at the end."""
        return self._tokens[-1] if self._tokens else ""

    def accept(self, symbol: str) -> bool:
        """Takes the next token if it is that symbol, and returns whether it was."""
        if self.peek() != symbol:
            return False
        self._tokens.pop()
        return True

    def symbol(self, symbol: str, place: str) -> None:
        """Takes a symbol that must come now."""
        if not self.accept(symbol):
            self.fail(f"{symbol!r} {place}", self.peek())

    def word(self, what: str) -> str:
        """Takes a bare word that must come now."""
        if not _WORD.fullmatch(self.peek()):
            self.fail(what, self.peek())
        return str(self._tokens.pop())

    def value(self, what: str) -> str:
        """Takes a bare word or a JSON string."""
        if not self.peek().startswith('"'):
            return self.word(what)
        token = self._tokens.pop()
        try:
            return str(json.loads(token, strict=False))
        except ValueError:
            self.fail(f"{what} as a JSON string", token, " Check its quotes and backslashes.")

    def fail(self, expected: str, given: str, remedy: str = "") -> NoReturn:
        """Raises the error that says what was expected and what came."""
        came = repr(given) if given else "the end"
        example = " Write for example 'halfstep-1 + softmax[device=cpu]=full \"reason\"'."
        raise RuleError(f"Rules needs {expected}, got {came} in {self._text!r}.{remedy or example}")
