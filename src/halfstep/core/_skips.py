"""Skipped steps in words: whose gradients were not finite, and when to speak about it."""

import sys
import warnings
from collections.abc import Callable
from typing import TypeAlias

from halfstep.errors import NonFiniteError

# Name and kind, "inf", "nan" or "inf and nan", of each parameter with a non-finite gradient.
Culprits: TypeAlias = tuple[tuple[str, str], ...]

_SHOWN = 5
# What the front-ends' `diagnose` is called with.
_CALLS = {"torch": "model, batch, loss_fn", "keras": "model, x, y", "jax": "function, *arguments"}
_FIRST = 25
# What stands between a step and whoever asked for it.
_INNER = ("halfstep.", "keras.", "jax.")


class SkippedStepsWarning(UserWarning):
    """Many optimizer steps in a row were skipped, so that training stands still.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     # Training stops where it would be said.
        ...     warnings.simplefilter("error", SkippedStepsWarning)
    """


def tell_skips(
    owner: str, limit: int | None, before: int, now: int, because: Callable[[], str]
) -> bool:
    """Warns ever more rarely while steps are skipped, or raises an error if asked to.

    Args:
        owner: The class that skips them.
        limit: After how many in a row to raise an error, which is its `max_consecutive_skips`;
            None for never.
        before: How many steps in a row were skipped when this was called last.
        now: How many are by now.
        because: Returns why, and what to do about it; only asked when there is something to say.

    Returns:
        Whether it warned.

    Raises:
        NonFiniteError: If the limit is reached.

    Example:
        >>> tell_skips("GradScaler", None, 23, 24, lambda: "because they overflowed")
        False
        >>> tell_skips("GradScaler", 3, 2, 3, lambda: "because they overflowed")
        Traceback (most recent call last):
        halfstep.errors.NonFiniteError: GradScaler needs fewer than max_consecutive_skips=3 \
skipped steps in a row, got 3, because they overflowed
    """
    if limit is not None and now >= limit:
        raise NonFiniteError(
            f"{owner} needs fewer than max_consecutive_skips={limit} skipped steps in a row, got "
            f"{now}, {because()}"
        )
    is_due = _level(now) > _level(before)
    if is_due:
        text = f"{now} optimizer steps in a row were skipped, {because()}"
        warnings.warn(SkippedStepsWarning(text), stacklevel=levels_to_user())
    return is_due


def _level(row: int) -> int:
    return (row // _FIRST).bit_length()


def culprits_text(culprits: Culprits) -> str:
    """Returns the first few names and kinds in words.

    Example:
        >>> culprits_text((("head.weight", "inf"),))
        'head.weight (inf)'
    """
    shown = ", ".join(f"{name} ({kind})" for name, kind in culprits[:_SHOWN])
    hidden = len(culprits) - _SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown or "unknown"


def where_from(frontend: str) -> str:
    """Returns in words how to find what made gradients overflow.

    Args:
        frontend: "torch", "keras" or "jax".

    Example:
        >>> where_from("torch")
        'halfstep.torch.diagnose(model, batch, loss_fn), or halfstep doctor on the script, tells \
the operation.'
    """
    call = f"halfstep.{frontend}.diagnose({_CALLS[frontend]})"
    return f"{call}, or halfstep doctor on the script, tells the operation."


def overflow_reason(culprits: Culprits) -> str:
    """Returns in words what the gradients held.

    Example:
        >>> overflow_reason((("weight", "nan"), ("bias", "inf")))
        'gradients held inf and nan'
    """
    kinds = [kind for kind in ("inf", "nan") if any(kind in held for _, held in culprits)]
    return f"gradients held {' and '.join(kinds)}" if kinds else "gradients were not finite"


def levels_to_user() -> int:
    """Returns the stack level of a warning that the caller wants to show in the user's code.

    Example:
        >>> levels_to_user() >= 1
        True
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_INNER):
        level, frame = level + 1, frame.f_back
    return level
