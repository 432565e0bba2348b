"""Every exception that halfstep raises on purpose.

Each one also derives from the built-in exception that fits, so that code which catches
`ValueError` or `RuntimeError` keeps working.
"""

__all__ = [
    "CheckpointError",
    "FormatError",
    "HalfstepError",
    "MissingExtraError",
    "MissingFileError",
    "MissingKeyError",
    "NoCheckError",
    "NonFiniteError",
    "NotScalarError",
    "PlanError",
    "PolicyError",
    "RefusedOperationError",
    "ReportError",
    "RuleError",
    "ScaleError",
    "ScalerStateError",
    "UnsupportedVersionError",
    "UsageError",
]


class HalfstepError(Exception):
    """Anything that halfstep refuses."""


class PolicyError(HalfstepError, ValueError):
    """A policy that cannot be read or does not make sense."""


class RuleError(HalfstepError, ValueError):
    """A rule that cannot be read, is given twice or contradicts another one."""


class ScaleError(HalfstepError, ValueError):
    """Settings of a loss scale that could destroy a run."""


class PlanError(HalfstepError, ValueError):
    """A plan that cannot be read, with the line and column of what is wrong."""


class FormatError(HalfstepError, ValueError):
    """A number format that is not known."""


class ReportError(HalfstepError, ValueError):
    """A report of a training, or what was measured, that cannot be read.

    Args:
        place: The key at which it cannot, such as "Report.steps[3].loss".
    """

    place = ""


class UsageError(HalfstepError, ValueError):
    """Any other argument that cannot be honoured."""


class NotScalarError(UsageError, AssertionError):
    """A predicate that is not one boolean."""


class MissingFileError(UsageError, FileNotFoundError):
    """A file or directory that does not exist."""


class MissingKeyError(UsageError, KeyError):
    """A state dict without a key that is needed."""

    # KeyError shows the repr of its text.
    __str__ = Exception.__str__


class CheckpointError(HalfstepError, RuntimeError):
    """A file that is not a whole checkpoint, or is more than data."""


class ScalerStateError(HalfstepError, RuntimeError):
    """A scaler whose methods were called in the wrong order."""


class NoCheckError(ScalerStateError, AssertionError):
    """A scaler asked for the result of a check that never ran."""


class NonFiniteError(HalfstepError, FloatingPointError):
    """Gradients that stay non-finite although the scale cannot go any lower."""


class RefusedOperationError(HalfstepError, RuntimeError):
    """An operation that the rules refuse, with the safe replacement in the text."""


class MissingExtraError(HalfstepError, ImportError):
    """An optional dependency that is not installed, with the line that installs it."""


class UnsupportedVersionError(HalfstepError, ImportError):
    """A framework in a version that halfstep does not support."""
