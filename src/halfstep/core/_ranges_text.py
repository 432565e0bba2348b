"""The ranges of a step as a table, with what to write below it."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from halfstep.core._exponents import Exponents

if TYPE_CHECKING:
    from halfstep.core._ranges import Ranges

_SHOWN = 40
_HEADER = ("module", "gradients", "lost at 1", "lost here", "scales")
_NOTHING = "no gradient is anything but zero"
_NOT_FINITE = "no gradient is finite, in float32 either: diagnose tells where that begins"
_LOST_UPDATES = 0.01


def text(ranges: "Ranges") -> str:
    """Returns a table of the modules, and what to write."""
    found = ranges.gradients()
    if not found.numbers:
        return _NOT_FINITE if found.infs or found.nans else _NOTHING
    outside = set(ranges.outside)
    shown = ranges.modules[:_SHOWN]
    body = aligned(_HEADER, (_cells(ranges, name, name in outside) for name in shown))
    hidden = len(ranges.modules) - _SHOWN
    more = [f"and {hidden} more modules"] if hidden > 0 else []
    return "\n".join([*body, *more, *_summary(ranges), *_updates(ranges), *_moments(ranges)])


def aligned(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns rows of words as lines in which columns are below each other.

    Example:
        >>> aligned(("a", "b"), [("long", "c")])
        ['a     b', 'long  c']
    """
    lines = [header, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _cells(ranges: "Ranges", name: str, outside: bool) -> tuple[str, ...]:
    found, window = ranges.gradients(name), ranges.window(module=name)
    scales = "any" if window is None else str(window)
    at_one = ranges.lost(module=name)
    mark = " !" if outside else ""
    return (name, span(found), f"{at_one:.2%}", f"{ranges.lost_here(name):.2%}", scales + mark)


def span(exponents: Exponents) -> str:
    """Returns between which powers of two values lie.

    Example:
        >>> span(Exponents({-30: 9, -20: 1}, largest=1e-6))
        '2^-30 to 2^-19'
    """
    if exponents.lowest is None or exponents.highest is None:
        return "zero"
    return f"2^{exponents.lowest} to 2^{exponents.highest + 1}"


def _summary(ranges: "Ranges") -> list[str]:
    power = ranges.power
    lost = f"{ranges.form} loses {ranges.lost():.2%} of the gradients without a scale"
    if power:
        lost += f", {ranges.lost(power):.2%} at 2^{power}"
    write = ["write:"] if ranges.remedy else []
    return [lost, *(f"  {line}" for line in (*write, *ranges.remedy.splitlines()))]


def _updates(ranges: "Ranges") -> list[str]:
    found = [pair for pair in ranges.updates if pair[1] > _LOST_UPDATES]
    lost = [f"  {fraction:7.1%}  {name}" for name, fraction in found[:_SHOWN]]
    return ["updates that change nothing:", *lost] if lost else []


def _moments(ranges: "Ranges") -> list[str]:
    lines = []
    for each in ranges.moments[:_SHOWN]:
        if each.vanishing or each.eps_vanishes:
            zero = f", and eps={each.eps:g} is zero there" if each.eps_vanishes else ""
            lines.append(f"  {each.vanishing:7.1%}  {each.parameter} in {each.form}{zero}")
    return ["squares that Adam loses:", *lines] if lines else []
