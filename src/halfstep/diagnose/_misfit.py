"""What of the numbers of a training does not fit its format, at the scale in force."""

from collections.abc import Sequence
from dataclasses import dataclass

from halfstep.core import FORWARD, Change, Ranges, Report, needs_wider
from halfstep.diagnose._heard import Evidence
from halfstep.diagnose._writing import fitted, in_bfloat16
from halfstep.report import share_text

MANY_LOST = 0.01
_SHOWN_MODULES = 5


@dataclass(frozen=True)
class Misfit:
    """Gradients that become 0, and modules that no scale suits: a scale and rules go together.

    Args:
        ranges: The numbers of the modules in low precision.
        power: The exponent of the scale in force.
        lost: Which part of the gradients becomes 0 there; 0.0 for hardly any.
        modules: The modules that do not fit at the scale that suits the most.
    """

    ranges: Ranges
    power: int
    lost: float
    modules: tuple[str, ...]

    @property
    def module(self) -> str:
        """The path of the module where it is one, and nothing else is to be told."""
        return self.modules[0] if self.modules[1:] == () and self.modules and not self.lost else ""

    @property
    def text(self) -> str:
        """It, in a sentence, without the name of the `module`."""
        form, what = self.ranges.form, "Its values need"
        if not self.module:
            what = f"the values of {_listed(self.modules)} need"
        outside = f"{what} more range than {form} has, at any scale" if self.modules else ""
        lost = f"{share_text(self.lost)} of the gradients become 0 in {form} at the scale in force"
        told = [f"{lost}, 2^{self.power}"] if self.lost else []
        text = ", and ".join([*told, *([outside] if outside else [])])
        return f"{text[:1].upper()}{text[1:]}."

    def changes(self, evidence: Evidence) -> tuple[Change, ...]:
        """Returns the scale and the rules with which all fits, or what has the range of float32.

        Args:
            evidence: What is known of the training.
        """
        if needs_wider(self.ranges, self.modules):
            return in_bfloat16(evidence)
        rescaled = bool(self.lost) or not _suit(self.ranges, self.power, self.modules)
        found = fitted(evidence, self.ranges, self.modules, rescaled=rescaled)
        return found or in_bfloat16(evidence)


def misfit(report: Report) -> Misfit | None:
    """Returns what does not fit, None where all does or hardly anything is lost.

    Args:
        report: What is known, with the diagnosis that is told.
    """
    ranges, fault = report.narrow, report.diagnosis.first
    told = fault.module if fault is not None and fault.breaks else ""
    outside = [name for name in ranges.outside if name != told]
    lost, power = ranges.lost(report.power), report.power
    modules = tuple(it for it in outside if _suffers(ranges, ranges.power or 0, it))
    is_small = fault is not None and fault.kind == "underflow"
    suffers = any(_suffers(ranges, power, name) for name in outside)
    if not (lost > MANY_LOST or suffers or (is_small and ranges.power is not None)):
        return None
    return Misfit(ranges, power, lost if lost > MANY_LOST else 0.0, modules)


def _suit(ranges: Ranges, power: int, others: Sequence[str]) -> bool:
    """Returns whether a scale suits all modules but some."""
    rest = set(ranges.modules).difference(others)
    return not any(_suffers(ranges, power, name) for name in rest)


def _suffers(ranges: Ranges, power: int, module: str) -> bool:
    """Returns whether a module loses many gradients at a scale, or overflows at it or forward."""
    forward = [row for row in ranges.of(module) if row.role in FORWARD]
    overflows = any(row.reference.overflowed(ranges.form) for row in forward)
    above = ranges.gradients(module).overflowed(ranges.form, power)
    return bool(overflows or above) or ranges.lost(power, module=module) > MANY_LOST


def _listed(names: Sequence[str]) -> str:
    shown, hidden = names[:_SHOWN_MODULES], len(names) - _SHOWN_MODULES
    if hidden > 0:
        return f"{', '.join(shown)} and {hidden} more modules"
    *before, last = [*shown, ""][: max(len(shown), 1)]
    return f"{', '.join(before)} and {last}" if before else last
