"""The values of one role at one module."""

from dataclasses import dataclass
from typing import Any

from halfstep.core._exponents import LOW_FORMATS, Exponents

FORWARD = ("input", "weight", "output")
BACKWARD = ("grad_output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class Range:
    """The values of one role at one module.

    Args:
        module: The dotted path of the module.
        role: "input", "weight", "output", "grad_output", "grad_input" or "grad_weight".
        reference: The values in float32.
        run: The values of the same step as it ran.
        form: The name of the format in which they were.
        families: The families of operations that the module runs, as rules call them.
        path: The path by which rules know the module, where it has another one.

    Example:
        >>> reference = Exponents({-30: 1, 0: 3}, largest=1.0)
        >>> run = Exponents({0: 3}, zeros=1, largest=1.0)
        >>> Range("head", "grad_weight", reference, run).lost
        0.25
    """

    module: str
    role: str
    reference: Exponents
    run: Exponents
    form: str = "float32"
    families: tuple[str, ...] = ()
    path: str | None = None

    @property
    def where(self) -> str:
        """The path by which rules know the module, empty for a model itself.

        Example:
            >>> Range("Net.head", "output", Exponents(), Exponents(), path="head").where
            'head'
        """
        return self.module if self.path is None else self.path

    @property
    def lost(self) -> float:
        """The fraction of what is not zero in float32 that was zero in the run.

        Example:
            >>> Range("head", "output", Exponents.of([1.0]), Exponents.of([0.0])).lost
            1.0
        """
        there, left = 1.0 - self.reference.zero, 1.0 - self.run.zero
        return max(0.0, 1.0 - left / there) if there else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, with the windows of each format.

        Example:
            >>> Range("head", "output", Exponents(), Exponents()).to_dict()["windows"]["float16"]
        """
        windows = {name: self.reference.window(name) for name in LOW_FORMATS}
        return {
            "module": self.module,
            "role": self.role,
            "form": self.form,
            "families": list(self.families),
            "reference": self.reference.to_dict(),
            "run": self.run.to_dict(),
            "lost": self.lost,
            "windows": {name: each and each.to_dict() for name, each in windows.items()},
        }
