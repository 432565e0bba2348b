"""Tells of rules that are limited to scopes which a function does not open."""

import warnings
from collections.abc import Iterator
from typing import Any

from halfstep.core import Rules, UnmatchedRuleWarning, levels_to_user, unmatched
from halfstep.jax._private import scope, sub_jaxprs


def warn_of_unmatched(jaxpr: Any, rules: Rules) -> None:
    """Warns of rules that speak of no operation, because of where they are limited to.

    Args:
        jaxpr: The program that is to run by them.
        rules: The rules.
    """
    patterns = [edit.where for edit in rules.edits if edit.where]
    if not patterns:
        return
    for text in unmatched(patterns, set(_paths(jaxpr, ""))):
        warnings.warn(UnmatchedRuleWarning(text), stacklevel=levels_to_user())


def _paths(jaxpr: Any, around: str) -> Iterator[str]:
    for equation in jaxpr.eqns:
        path = ".".join(filter(None, (around, scope(equation))))
        yield path
        for inner in sub_jaxprs(equation.params):
            yield from _paths(inner, path)
