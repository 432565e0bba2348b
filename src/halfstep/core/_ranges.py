"""How the values of one training step lie against what each format can hold."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from halfstep.core._changes import Change, written
from halfstep.core._exponents import Exponents
from halfstep.core._fitting import fitting
from halfstep.core._moments import Moment
from halfstep.core._range import BACKWARD, FORWARD, Range
from halfstep.core._ranges_text import text
from halfstep.core._text import check_known
from halfstep.core._window import Window, most_common

# How far from both ends of a window no scale is as good as any.
_MARGIN = 8
# The scales that a curve is shown over.
_POWERS = range(-24, 49)


@dataclass(frozen=True)
class Ranges:
    """The values of a training step, by module and role; print it for a table.

    Scales are powers of two, and given as their exponents. What gradients would lose in a format
    and at a scale is read from the step in float32, whatever the step ran in.

    Args:
        rows: The values, module by module.
        form: The name of the format that the step computes in, or might.
        entering: The sum of the magnitudes of the gradients that enter the model.
        updates: Names of parameters, and the fraction of their updates that changed nothing.
        moments: What an Adam would make of the gradients.
        policy: The text of the policy that the model is prepared by, empty where it is not.

    Example:
        >>> gradient = Exponents({-30: 9, -20: 1}, largest=1e-6)
        >>> found = Ranges((Range("head", "grad_weight", gradient, gradient),))
        >>> found.lost(), found.power, found.lost(found.power)
        (0.9, 20, 0.0)
        >>> print(found.window())
        2^5 to 2^35
    """

    rows: tuple[Range, ...] = ()
    form: str = "float16"
    entering: float = 0.0
    updates: tuple[tuple[str, float], ...] = ()
    moments: tuple[Moment, ...] = ()
    policy: str = ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The paths of the modules, in their order.

        Example:
            >>> Ranges().modules
            ()
        """
        return tuple(self._by_module)

    @cached_property
    def _by_module(self) -> dict[str, list[Range]]:
        found: dict[str, list[Range]] = {}
        for row in self.rows:
            found.setdefault(row.module, []).append(row)
        return found

    def of(self, module: str | None) -> Sequence[Range]:
        """Returns the rows of a module, or all.

        Args:
            module: The path of the module, None for all.

        Raises:
            UsageError: No module has that path.

        Example:
            >>> Ranges((Range("head", "output", Exponents(), Exponents()),)).of("haed")
            Traceback (most recent call last):
            halfstep.errors.UsageError: Ranges needs a module among head, got 'haed'. Did you mean \
'head'?
        """
        if module is None:
            return self.rows
        if module not in self._by_module:
            check_known("Ranges", "module", module, self._by_module)
        return self._by_module[module]

    def gradients(self, module: str | None = None) -> Exponents:
        """Returns the exponents of all gradients in float32, or of those at one module.

        Example:
            >>> Ranges().gradients().total
            0
        """
        return sum((row.reference for row in self._backward(module)), Exponents())

    def lost(self, power: int = 0, *, module: str | None = None, form: str | None = None) -> float:
        """Returns the fraction of the gradients that becomes zero.

        Args:
            power: The exponent of the scale.
            module: The path of a module, without one all of them.
            form: The name of a format, without one that of the step.

        Example:
            >>> Ranges().lost()
            0.0
        """
        return self.gradients(module).flushed(form or self.form, power)

    def lost_here(self, module: str) -> float:
        """Returns the largest fraction of its gradients, of any role, that a module lost.

        Example:
            >>> Ranges((Range("head", "output", Exponents(), Exponents()),)).lost_here("head")
            0.0
        """
        return max((row.lost for row in self._backward(module)), default=0.0)

    def curve(
        self, powers: Iterable[int], *, module: str | None = None, form: str | None = None
    ) -> tuple[tuple[int, float, float], ...]:
        """Returns what is lost at each of several scales.

        Args:
            powers: The exponents of the scales.
            module: The path of a module, without one all of them.
            form: The name of a format, without one that of the step.

        Returns:
            For each power: itself, the fraction that becomes zero, and the one that overflows.

        Example:
            >>> gradient = Exponents({-30: 9, -20: 1}, largest=1e-6)
            >>> Ranges((Range("head", "grad_weight", gradient, gradient),)).curve([0, 40])
            ((0, 0.9, 0.0), (40, 0.0, 0.1))
        """
        found, name = self.gradients(module), form or self.form
        return tuple(
            (power, found.flushed(name, power), found.overflowed(name, power)) for power in powers
        )

    def window(self, *, module: str | None = None, form: str | None = None) -> Window | None:
        """Returns the scales at which no role of a module, or of any, loses either end.

        Args:
            module: The path of a module, without one all of them.
            form: The name of a format, without one that of the step.

        Returns:
            The window, which may be empty; None where no gradient is anything but zero.

        Example:
            >>> Ranges().window()
        """
        name = form or self.form
        return Window.common(row.reference.window(name) for row in self._backward(module))

    @cached_property
    def power(self) -> int | None:
        """The exponent of the scale to choose: the middle of where the most modules lose nothing.

        It is 0, which is no scale, where that is far from both ends; None where no scale fits any
        module, or no gradient is anything but zero.

        Example:
            >>> gradient = Exponents({-30: 1}, largest=2.0**-30)
            >>> row = Range("head", "grad_output", gradient, gradient)
            >>> Ranges((row,)).power
            25
        """
        windows = [each for name in self.modules if (each := self.window(module=name))]
        if not windows:
            return None
        found = Window.common(windows) or most_common(windows)
        inner = Window(found.lowest + _MARGIN, found.highest - _MARGIN)
        return 0 if 0 in inner else found.middle

    @property
    def scale(self) -> float | None:
        """The scale to multiply the loss by: 2 to the `power`.

        Example:
            >>> gradient = Exponents({-30: 1}, largest=2.0**-30)
            >>> row = Range("head", "grad_output", gradient, gradient)
            >>> Ranges((row,)).scale
            33554432.0
        """
        return None if self.power is None else math.ldexp(1.0, self.power)

    @property
    def region_scale(self) -> float | None:
        """The same as the scale of a region, which multiplies whatever enters to this size.

        Example:
            >>> gradient = Exponents({-30: 1}, largest=2.0**-30)
            >>> row = Range("head", "grad_output", gradient, gradient)
            >>> Ranges((row,), entering=0.25).region_scale
            16777216.0
        """
        if self.power is None or not self.entering:
            return None
        return math.ldexp(1.0, self.power + math.frexp(self.entering)[1])

    @cached_property
    def outside(self) -> tuple[str, ...]:
        """The modules that the format cannot hold: gradients at that scale, or values forward.

        Example:
            >>> Ranges().outside
            ()
        """
        return tuple(name for name in self.modules if not self._fits(name))

    @property
    def changes(self) -> tuple[Change, ...]:
        """What to change so that all of it fits, nothing where nothing is lost without a scale.

        Example:
            >>> Ranges().changes
            ()
        """
        return fitting(self)

    @property
    def remedy(self) -> str:
        """What to write so that all of it fits, with its imports; empty where it does.

        Example:
            >>> gradient = Exponents({-30: 1}, largest=2.0**-30)
            >>> row = Range("head", "grad_output", gradient, gradient)
            >>> print(Ranges((row,), entering=0.25, policy="mixed_float16").remedy)
            from halfstep import Policy
            from halfstep.torch import prepare
            policy = Policy.parse("mixed_float16, scale=dynamic(init_scale=16777216.0)")
            region = prepare(model, optimizer, policy=policy)
        """
        return written(self.changes)

    def _fits(self, module: str) -> bool:
        window = self.window(module=module)
        forward = [row for row in self.of(module) if row.role in FORWARD]
        overflows = any(row.reference.overflowed(self.form) for row in forward)
        fits = window is None or (self.power is not None and self.power in window)
        return fits and not overflows

    def _backward(self, module: str | None) -> Iterator[Range]:
        return (row for row in self.of(module) if row.role in BACKWARD)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain data, with what follows from it.

        Example:
            >>> Ranges().to_dict()["power"]
        """
        window = self.window()
        return {
            "form": self.form,
            "entering": self.entering,
            "power": self.power,
            "remedy": self.remedy,
            "region_scale": self.region_scale,
            "window": window and window.to_dict(),
            "modules": [self._summary(name) for name in self.modules],
            "rows": [row.to_dict() for row in self.rows],
            "updates": dict(self.updates),
            "moments": [each.to_dict() for each in self.moments],
        }

    def _summary(self, module: str) -> dict[str, Any]:
        window = self.window(module=module)
        return {
            "module": module,
            "lost": self.lost(module=module),
            "lost_here": self.lost_here(module),
            "window": window and window.to_dict(),
            "outside": not self._fits(module),
            "curve": [list(point) for point in self.curve(_POWERS, module=module)],
        }

    def __str__(self) -> str:
        return text(self)
