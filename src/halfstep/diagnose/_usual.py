"""How large numbers usually are where something broke."""

from collections.abc import Iterable

from halfstep.core import FORWARD, Fault, Ranges


def usual_of(seen: Iterable[Ranges], fault: Fault) -> float:
    """Returns the largest number in the forward passes of a module, or else of all; 0 for none.

    Args:
        seen: What was seen in steps that went well.
        fault: What broke in another one.

    Example:
        >>> fault = Fault("ff", "matmul", "forward", "output", "inf", "float16", (2,), 9.0)
        >>> usual_of([], fault)
        0.0
    """
    rows = [row for each in seen for row in each.rows if row.role in FORWARD]
    own = [row for row in rows if row.module == fault.module]
    return max((row.reference.largest for row in own or rows), default=0.0)
