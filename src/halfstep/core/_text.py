"""Reading and quoting the text forms that policies, rules and scales share."""

import difflib
from collections.abc import Iterable


def suggestion(word: object, known: Iterable[str]) -> str:
    """Returns " Did you mean ...?" for a word that is close to a known one, else nothing.

    Example:
        >>> suggestion("flaot16", ["float16", "float32"])
        " Did you mean 'float16'?"
    """
    close = difflib.get_close_matches(str(word).rpartition(".")[2], list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def split(text: str, separator: str = ",") -> list[str]:
    """Splits at a separator that stands outside of brackets and of double quotes.

    Example:
        >>> split('scale=static(2.0), rules=none + softmax=full "a, b"')
        ['scale=static(2.0)', 'rules=none + softmax=full "a, b"']
    """
    pieces, depth, quoted, escaped = [""], 0, False, False
    for letter in text:
        if not quoted and not depth and letter == separator:
            pieces.append("")
            continue
        pieces[-1] += letter
        quoted, escaped = (
            (quoted != (letter == '"' and not escaped)),
            quoted and letter == "\\" and not escaped,
        )
        depth += 0 if quoted else (letter in "([") - (letter in ")]")
    return [piece.strip() for piece in pieces]
