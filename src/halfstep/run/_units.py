"""In which unit a difference says something."""

from collections.abc import Callable, Sequence

from halfstep.report import number

DIGITS = 5
_SAME = 10.0**-DIGITS


def unit_of(name: str, firsts: Sequence[float], others: Sequence[float]) -> Callable[[float], str]:
    """Returns what writes a difference between values, as "" where it is not worth a number.

    Args:
        name: What the values are. Fractions of successes are compared in percentage points.
        firsts: The values that the others are compared with.
        others: The others.

    Example:
        >>> unit_of("loss", [8e11], [9e11])(1e11), unit_of("loss", [1.0], [1.0])(1e-6)
        ('12 %', '')
        >>> unit_of("accuracy", [0.5], [0.6])(0.1), unit_of("reward", [-1.0], [2.0])(3.0)
        ('10 points', '3')
    """
    values = [*firsts, *others]
    if "acc" in name.lower() and all(0 <= value <= 1 for value in values):
        return lambda difference: f"{100 * difference:.2g} points" if difference else ""
    middle = abs(sum(firsts)) / len(firsts)
    same_sign = all(value > 0 for value in values) or all(value < 0 for value in values)
    if not same_sign or max(map(abs, values)) > 2 * middle:
        return lambda difference: number(difference, digits=2) if difference else ""
    return lambda difference: _percent(difference / middle)


def _percent(share: float) -> str:
    return "" if share < _SAME else f"{number(100 * share, digits=2)} %"
