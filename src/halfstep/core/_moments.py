"""What an Adam would make of a gradient in the format of its state."""

import math
from dataclasses import dataclass
from typing import Any

from halfstep.core._exponents import Exponents
from halfstep.core._formats import Format
from halfstep.core._limits import flush_exponent


@dataclass(frozen=True)
class Moment:
    """What an Adam would make of the squares of a gradient.

    Args:
        parameter: The name of the parameter.
        form: The name of the format that the optimizer keeps the second moment in.
        eps: What the optimizer adds to the root of it.
        squares: What one step adds to the second moment, where the gradient is not zero.

    Example:
        >>> moment = Moment("weight", "float16", 1e-8, Exponents({-30: 1, -20: 3}, largest=1e-6))
        >>> moment.vanishing, moment.eps_vanishes
        (0.25, True)
    """

    parameter: str
    form: str
    eps: float
    squares: Exponents

    @property
    def vanishing(self) -> float:
        """The fraction of the squares that becomes zero, be it in float32 already.

        Example:
            >>> Moment("weight", "float16", 1e-8, Exponents.of([1e-9, 1.0])).vanishing
            0.5
        """
        flushed = self.squares.flushed(self.form)
        return self.squares.zero + (1.0 - self.squares.zero) * flushed

    @property
    def eps_vanishes(self) -> bool:
        """Whether eps is zero in the format, so that nothing keeps the step from dividing by 0.

        Example:
            >>> Moment("weight", "float16", 1e-8, Exponents.of([1e-9, 1.0])).eps_vanishes
            True
        """
        return self.eps <= math.ldexp(1.0, flush_exponent(Format.named(self.form)))

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data.

        Example:
            >>> Moment("weight", "float32", 1e-8, Exponents()).to_dict()["vanishing"]
            0.0
        """
        return {
            "parameter": self.parameter,
            "form": self.form,
            "eps": self.eps,
            "squares": self.squares.to_dict(),
            "vanishing": self.vanishing,
            "eps_vanishes": self.eps_vanishes,
        }
