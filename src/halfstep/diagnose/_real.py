"""Which faults are more than a loss scale that finds its range."""

from halfstep.core import Diagnosis, Fault

_SCALES = ("scale=", "scale(", "Scaler(", "LossScale")


def is_real(diagnosis: Diagnosis) -> bool:
    """Returns whether a fault is none that another loss scale would cure.

    Args:
        diagnosis: What was found in a step.

    Example:
        >>> is_real(Diagnosis())
        False
    """
    fault = diagnosis.first
    if fault is None or fault.kind == "underflow":
        return False
    return fault.phase == "forward" or fault.in_float32 or _is_cured_otherwise(fault)


def _is_cured_otherwise(fault: Fault) -> bool:
    # A remedy was tried, and lower scales were tried before the others.
    return bool(fault.remedy) and not any(word in fault.remedy for word in _SCALES)
