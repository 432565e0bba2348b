"""Rules that are limited to modules which are not there."""

import difflib
import fnmatch
from collections.abc import Collection, Iterable

_NO_PATHS = "Nothing that ran has a path: in JAX, open a jax.named_scope around it."


class UnmatchedRuleWarning(UserWarning):
    """A rule is limited to modules that do not exist.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     # Rules that are written for several models.
        ...     warnings.simplefilter("ignore", UnmatchedRuleWarning)
    """


def unmatched(patterns: Iterable[str], paths: Collection[str]) -> list[str]:
    """Returns what to say about each pattern that no path matches.

    Args:
        patterns: The `where` of rules.
        paths: The dotted paths of the modules that ran.

    Example:
        >>> print(*unmatched(["haed"], ["head", "body"]))
        The rules are limited to modules where='haed', and no module that ran has such a path. \
There are paths such as 'head'.
    """
    named = [path for path in paths if path]
    missing = [each for each in patterns if not fnmatch.filter(paths, each)]
    return [_text(each, named) for each in missing]


def _text(pattern: str, paths: list[str]) -> str:
    near = difflib.get_close_matches(pattern, paths, n=3) or sorted(paths)[:3]
    there = f"There are paths such as {', '.join(map(repr, near))}." if near else _NO_PATHS
    return (
        f"The rules are limited to modules where={pattern!r}, and no module that ran has such a "
        f"path. {there}"
    )
