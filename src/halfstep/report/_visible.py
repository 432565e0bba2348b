"""Names that anybody may have chosen, so that they can be shown wherever text is read."""

import unicodedata

# Control characters, invisible ones such as those that reverse a line, halves of a pair, and what
# ends a line.
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def visible(text: str, *, lines: bool = False) -> str:
    r"""Returns a text in which what is not seen, or moves the rest, is written as its code.

    Args:
        text: Such as the name of a module.
        lines: Whether it may have several lines.

    Example:
        >>> visible("head\x1b[31m\u202e"), visible("naïve/層")
        ('head\\x1b[31m\\u202e', 'naïve/層')
    """
    return "".join(_shown(letter, lines) for letter in text)


def _shown(letter: str, lines: bool) -> str:
    if unicodedata.category(letter) not in _UNSEEN or (lines and letter == "\n"):
        return letter
    return letter.encode("unicode_escape").decode()
