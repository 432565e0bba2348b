"""What was seen of a step of a training that was going on."""

from dataclasses import dataclass
from typing import Any

from halfstep.core._exponents import Exponents
from halfstep.core._ranges_text import aligned, span

_HEADER = ("module", "role", "format", "values", "zero", "subnormal", "saturated", "inf", "nan")


@dataclass(frozen=True)
class Reading:
    """The values of one role at one module, as they were.

    Args:
        module: The dotted path of the module.
        role: "input", "weight", "output", "grad_output", "grad_input" or "grad_weight".
        form: The name of the format in which they were.
        exponents: How many lay between which powers of two.

    Example:
        >>> Reading("head", "output", "float16", Exponents({15: 1}, largest=4e4)).headroom
        0
    """

    module: str
    role: str
    form: str
    exponents: Exponents

    @property
    def headroom(self) -> int | None:
        """How many times the values can double in their format, None where all are zero.

        Example:
            >>> Reading("head", "output", "float16", Exponents.of([1.0])).headroom
            15
        """
        window = self.exponents.window(self.form)
        return None if window is None else window.highest

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data.

        Example:
            >>> Reading("head", "output", "float16", Exponents()).to_dict()["headroom"]
        """
        return {
            "module": self.module,
            "role": self.role,
            "form": self.form,
            "exponents": self.exponents.to_dict(),
            "headroom": self.headroom,
        }


@dataclass(frozen=True)
class Sample:
    """One step that was looked at; print it for a table.

    Args:
        call: Which call of the model in training it was, counted from 1.
        reason: Why it was looked at: "first", "every" or "fault".
        readings: The values, module by module.

    Example:
        >>> reading = Reading("head", "output", "float16", Exponents({15: 1}, largest=4e4))
        >>> print(Sample(100, "every", (reading,)))
        call 100
        module  role    format   values        zero   subnormal  saturated  inf  nan
        head    output  float16  2^15 to 2^16  0.00%  0.00%      100.00%    0    0
    """

    call: int
    reason: str
    readings: tuple[Reading, ...] = ()

    def find(self, module: str, role: str) -> Reading | None:
        """Returns the reading of a role at a module, None where there is none.

        Example:
            >>> Sample(1, "first").find("head", "output")
        """
        return next(
            (each for each in self.readings if (each.module, each.role) == (module, role)), None
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data.

        Example:
            >>> Sample(1, "first").to_dict()
            {'call': 1, 'reason': 'first', 'readings': []}
        """
        readings = [each.to_dict() for each in self.readings]
        return {"call": self.call, "reason": self.reason, "readings": readings}

    def __str__(self) -> str:
        after = {"fault": ", after a skipped step"}.get(self.reason, "")
        return "\n".join(
            [f"call {self.call}{after}", *aligned(_HEADER, map(_cells, self.readings))]
        )


def _cells(reading: Reading) -> tuple[str, ...]:
    found, form = reading.exponents, reading.form
    fractions = (found.zero, found.subnormal(form), found.saturated(form))
    shares = (f"{fraction:.2%}" for fraction in fractions)
    words = (reading.module, reading.role, form, span(found))
    return (*words, *shares, str(found.infs), str(found.nans))
