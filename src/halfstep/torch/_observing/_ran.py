"""What is noted of one operation that ran."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from halfstep.core import Exponents
from halfstep.torch._observing._extremes import Extremes
from halfstep.torch._observing._places import Place
from halfstep.torch._observing._ways import Way

LOW = ("float16", "bfloat16")
# What makes no inf of -inf, and what makes none if it is by a number above zero.
_KEEP_SIGNS = ("add", "cast", "cumsum", "mean", "sum")
_SCALE = ("divide", "multiply")


class Key(NamedTuple):
    """What names an operation in a run of the same step in other formats, too."""

    path: str
    call: int
    phase: str
    word: str
    nth: int


class Value(NamedTuple):
    """A tensor that went into an operation, or came out of it.

    Args:
        held: Its extremes, None where they do not matter.
        role: What it is to the model.
        dtype: The name of its format.
        shape: Its shape.
        name: The name of the parameter or buffer that it is, or is the gradient of; else empty.
        exponents: How many of its numbers lie where, None where nobody counted.
    """

    held: Extremes | None
    role: str
    dtype: str
    shape: tuple[int, ...]
    name: str = ""
    exponents: Exponents | None = None

    @property
    def finite(self) -> bool:
        """Whether nothing in it is inf or NaN, as far as it matters."""
        return self.held is None or self.held.finite


@dataclass(frozen=True, eq=False)
class Ran:
    """One operation of a step.

    Args:
        place: Where it ran; in a backward pass, where the forward ran that it belongs to.
        key: What names it.
        name: What PyTorch calls it.
        source: The line that it came from.
        inputs: The tensors that it read.
        outputs: The tensors that it wrote.
        constants: The numbers that it was called with.
        entered: Whether it only stands for a tensor that came from outside.
        way: How it, or its forward, computes in low precision; None outside of all that casts.
        where: The path by which the rules there know its module, None for one out of reach.
    """

    place: Place
    key: Key
    name: str
    source: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    constants: tuple[float, ...] = ()
    entered: bool = False
    way: Way | None = None
    where: str | None = None

    @property
    def bad(self) -> Value | None:
        """What it wrote that is not finite, None for nothing."""
        return next((each for each in self.outputs if not each.finite), None)

    @property
    def made(self) -> Value | None:
        """What it wrote that is not finite and does not come from what it read, None for nothing.

        NaN of what was infinite, such as a row of -inf, is new, too.
        """
        bad = self.bad
        return bad if bad is not None and (self.fresh or self._new_nan(bad)) else None

    @property
    def fresh(self) -> bool:
        """Whether nothing that it read explains what it wrote."""
        finite = all(each.finite for each in self.inputs)
        return (finite and all(map(math.isfinite, self.constants))) or self._new_inf()

    def _new_inf(self) -> bool:
        """Returns whether it wrote inf where it read none but -inf, which a mask may hold."""
        written = [each.held for each in self.outputs if each.held]
        read = [each.held for each in self.inputs if each.held]
        same_sign = len(read) == 1 and self.constants and min(self.constants) > 0
        return (
            any(each.high == math.inf for each in written)
            and all(each.finite or each.only_minus_inf for each in read)
            and not any(math.isnan(each) or each == math.inf for each in self.constants)
            and (self.key.word in _KEEP_SIGNS or (self.key.word in _SCALE and bool(same_sign)))
        )

    def _new_nan(self, bad: Value) -> bool:
        read = [each.held for each in self.inputs if each.held]
        old = any(each.has_nan for each in read) or any(map(math.isnan, self.constants))
        return bad.held is not None and bad.held.has_nan and not old

    @property
    def low(self) -> bool:
        """Whether what it wrote is in a format of 16 bits."""
        return any(each.dtype in LOW for each in self.outputs)

    @property
    def largest(self) -> float | None:
        """The largest finite magnitude that it read, of gradients where there are any."""
        gradients = [each for each in self.inputs if each.role.startswith("grad")]
        sizes = [each.held.largest for each in gradients or self.inputs if each.held]
        return max((each for each in sizes if each is not None), default=None)
