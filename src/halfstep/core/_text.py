"""Reading the text forms that policies, rules and scales share."""

import difflib
import re
from collections.abc import Iterable

from halfstep.errors import UsageError

_SHOWN = 12
_UNIT = re.compile(r'(?:"(?:[^"\\]|\\.)*"?|[^"])', re.DOTALL)
_CALL = re.compile(r"\s*([\w-]*)\s*(?:\((.*)\)\s*)?", re.DOTALL)


def suggestion(word: object, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" for a word that is close to a known one, else nothing.

    Example:
        >>> suggestion("flaot16", ["float16", "float32"])
        " Did you mean 'float16'?"
    """
    bare = str(word).rpartition(".")[2] if not isinstance(word, str) else word
    close = difflib.get_close_matches(bare, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_known(thing: str, name: str, value: object, known: Iterable[str]) -> None:
    """Refuses a value that is none of the known ones, of which it tells the first.

    Args:
        thing: What was called.
        name: The argument.
        value: What was given.
        known: What may be.

    Raises:
        UsageError: It is none of them.

    Example:
        >>> check_known("of", "module", "haed", ["head", "tail"])
        Traceback (most recent call last):
        halfstep.errors.UsageError: of needs a module among head, tail, got 'haed'. Did you mean \
'head'?
    """
    found = list(known)
    if value in found:
        return
    hidden = len(found) - _SHOWN
    more = f" and {hidden} more" if hidden > 0 else ""
    listed = f"{', '.join(found[:_SHOWN]) or 'nothing'}{more}"
    near = suggestion(value, found) or " Write one of these, or leave it out."
    article = "an" if name[0] in "aeiou" else "a"
    raise UsageError(f"{thing} needs {article} {name} among {listed}, got {value!r}.{near}")


def split(text: str, separator: str = ",") -> list[str]:
    """Splits at a separator that stands outside of brackets and of double quotes.

    Example:
        >>> split('scale=static(2.0), rules=none + softmax=full "a, b"')
        ['scale=static(2.0)', 'rules=none + softmax=full "a, b"']
    """
    pieces, depth = [""], 0
    for unit in _UNIT.findall(text):
        depth = max(0, depth + (unit in "([") - (unit in ")]"))
        if unit == separator and not depth:
            pieces.append("")
        else:
            pieces[-1] += unit
    return [piece.strip() for piece in pieces]


def call(text: str) -> tuple[str, list[str]] | None:
    """Splits `name(first, second)` into its name and arguments; None where it is not one.

    Example:
        >>> call("static(1024.0)")
        ('static', ['1024.0'])
        >>> call("none")
        ('none', [])
    """
    match = _CALL.fullmatch(text)
    if match is None or not match[1]:
        return None
    return match[1], split(match[2]) if match[2] and match[2].strip() else []


def pairs(
    pieces: Iterable[str], known: Iterable[str], error: type[Exception], thing: str
) -> dict[str, str]:
    """Returns the `key=value` pieces as a dict, or raises an error that names the wrong piece.

    Example:
        >>> pairs(["a=1", "b=x=y"], ["a", "b"], ValueError, "Example")
        {'a': '1', 'b': 'x=y'}
    """
    known, found = list(known), dict[str, str]()
    for piece in pieces:
        key, equals, value = (part.strip() for part in piece.partition("="))
        if not equals or not value:
            raise error(f"{thing} needs key=value, got {piece!r}. Write for example {known[0]}=...")
        if key not in known:
            near = suggestion(key, known)
            raise error(f"{thing} needs a key among {', '.join(known)}, got {key!r}.{near}")
        if key in found:
            raise error(f"{thing} needs each key once, got {key!r} twice. Remove one of them.")
        found[key] = value
    return found
