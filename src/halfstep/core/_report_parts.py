"""What a report is made of: steps, casts and findings."""

from dataclasses import dataclass, field
from typing import Any

from halfstep.core._changes import Change
from halfstep.core._skips import Culprits
from halfstep.errors import ReportError

SEVERITIES = ("error", "warning", "note")
_KINDS = ("inf", "nan", "inf and nan", "unknown")


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Args:
        number: The step, counted from 1.
        loss: The loss, None where none was seen.
        scale: The loss scale during the step, None where there is none.
        skipped: Whether the optimizer left the parameters alone.
        reason: Why it did; empty if it did not.
        nonfinite: Name and kind, "inf", "nan", "inf and nan" or "unknown", of each gradient that
            was not finite.

    Example:
        >>> Step(3, loss=0.25, scale=65536.0).skipped
        False
    """

    number: int
    loss: float | None = None
    scale: float | None = None
    skipped: bool = False
    reason: str = ""
    nonfinite: Culprits = ()

    def __post_init__(self) -> None:
        _check("Step", "number", self.number, "at least 1", self.number >= 1)
        for _, kind in self.nonfinite:
            check_among("Step", "nonfinite", kind, _KINDS)


@dataclass(frozen=True)
class Cast:
    """Casts that the rules inserted for one operation.

    Args:
        operation: The operation.
        module: The dotted path of the module; the name of its class for the outermost one.
        count: How many casts there were.
        source: The format that was cast.
        target: The format that it was cast to.
        bytes: How many bytes they wrote.

    Example:
        >>> Cast("aten::linear", "head", 2, "float32", "float16", 4096).bytes
        4096
    """

    operation: str
    module: str
    count: int
    source: str
    target: str
    bytes: int

    def __post_init__(self) -> None:
        _check("Cast", "count", self.count, "at least 0", self.count >= 0)
        _check("Cast", "bytes", self.bytes, "at least 0", self.bytes >= 0)


@dataclass(frozen=True)
class Finding:
    """One thing to know, and what to do about it.

    Args:
        severity: "error" where training is broken, "warning" where it loses something, "note" else.
        text: It, in one sentence.
        module: The dotted path of the module that it is about; empty for the whole training.
        remedy: What to write instead, to be pasted; empty where nothing is known.
        changes: What that changes.

    Example:
        >>> print(Finding("warning", "A third of the gradients become 0.", "head"))
        warning: head: A third of the gradients become 0.
    """

    severity: str
    text: str
    module: str = ""
    remedy: str = ""
    changes: tuple[Change, ...] = field(default=(), repr=False, compare=False)

    def __post_init__(self) -> None:
        check_among("Finding", "severity", self.severity, SEVERITIES)

    def __str__(self) -> str:
        return ": ".join(filter(None, [self.severity, self.module, self.text]))


def _check(thing: str, name: str, value: Any, expected: str, holds: bool) -> None:
    if not holds:
        raise ReportError(f"{thing} needs {name} {expected}, got {value!r}. Write another number.")


def check_among(thing: str, name: str, value: str, known: tuple[str, ...]) -> None:
    """Refuses a value that is none of the known ones.

    Raises:
        ReportError: With the known ones.
    """
    if value not in known:
        raise ReportError(f"{thing} needs {name} among {', '.join(known)}, got {value!r}.")
