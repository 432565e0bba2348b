"""Where operations have no value or no derivative, and what to write so that they keep off."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.core import Format

_SAFE = """\
safe = torch.where({taken}, h, {instead})  # h is what goes into {word}
torch.where({taken}, {call}, 0)  # in place of what {word} returns"""
# A logarithm that is left out would make a loss of nothing where a prediction is quite wrong.
_CLAMPED = "torch.{word}(h.clamp(min=torch.finfo(h.dtype).tiny))  # h is what goes into {word}"
# An angle is not left out either, for that at -1 may be the largest of all.
_INSIDE = """\
eps = torch.finfo(h.dtype).eps  # h is what goes into {word}
torch.{word}(h.clamp(-1 + eps, 1 - eps))  # in place of what {word} returns"""
_DIVIDED = """\
safe = torch.where({taken}, h, {instead})  # h is what is divided by
torch.where({taken}, dividend / safe, 0)  # in place of dividend / h"""
_VANISHES = "epsilon = {epsilon:g}  # what is smaller than {least:.2g} vanishes in {dtype}"
_ROUNDS = "epsilon = {epsilon:g}  # 1 - epsilon is 1 in {dtype} for what is below {least:.2g}"
_APART = "{epsilon}\nh = {apart}  # h is what {goes} {word}; or put epsilon for a smaller one"


@dataclass(frozen=True)
class Edge:
    """Where an operation has no value or no derivative.

    Args:
        taken: Where it has one, as text about h.
        instead: A number where it has one.
        call: The operation, as text about `safe`.
        is_there: Whether numbers are at the edge, one by one.
        operand: Which of the operands is meant.
        rounds: Whether it is met where a number near 1 is rounded to 1, and not only near 0.
        form: How it is kept off, as text about the others.
        apart: How numbers are kept apart from it by epsilon, as text about h.
    """

    taken: str
    instead: float
    call: str
    is_there: Callable[[Any], Any]
    operand: int = 0
    rounds: bool = False
    form: str = _SAFE
    apart: str = "h.clamp(min=epsilon)"

    def met(self, args: tuple[Any, ...]) -> bool:
        """Returns whether a call of the operation meets the edge."""
        value = args[self.operand] if len(args) > self.operand else None
        return isinstance(value, Tensor) and bool(self.is_there(value).any())

    def kept_off(self, by: float) -> Callable[[Any], Any]:
        """Returns what moves numbers away from the edge."""

        def move(value: Any) -> Any:
            known = isinstance(value, Tensor) and value.is_floating_point()
            return torch.where(self.is_there(value), by, value) if known else value

        return move

    def kept_apart(self, epsilon: float) -> Callable[[Any], Any]:
        """Returns what moves numbers away from the edge by epsilon."""

        def move(value: Any) -> Any:
            known = isinstance(value, Tensor) and value.is_floating_point()
            return _FORMS[self.apart](value, epsilon) if known else value

        return move

    def safe(self, word: str) -> str:
        """Returns how to call the operation only where it has a value."""
        return self.form.format(taken=self.taken, instead=self.instead, word=word, call=self.call)

    def epsilon(self, dtype: str) -> float:
        """Returns a number that a format can tell from the edge."""
        format = Format.named(dtype)
        least = format.epsilon if self.rounds else format.min_normal
        return 10.0 ** math.ceil(math.log10(least))

    def written_apart(self, word: str, dtype: str) -> str:
        """Returns how numbers are kept apart from the edge in a format."""
        format, text = Format.named(dtype), _ROUNDS if self.rounds else _VANISHES
        least = format.epsilon / 2 if self.rounds else format.min_normal
        epsilon = text.format(epsilon=self.epsilon(dtype), least=least, dtype=dtype)
        goes = "goes into" if self.operand == 0 else "is below in"
        return _APART.format(epsilon=epsilon, apart=self.apart, goes=goes, word=word)


def _up_to_zero(h: Any) -> Any:
    return h <= 0


def _at_zero(h: Any) -> Any:
    return h == 0


def _from_one(h: Any) -> Any:
    return h.abs() >= 1


def _log(word: str) -> Edge:
    return Edge("h > 0", 2.0**-14, "", _up_to_zero, rounds=True, form=_CLAMPED)


def _arc(word: str) -> Edge:
    return Edge("h.abs() < 1", 0, "", _from_one, rounds=True, form=_INSIDE, apart=_BETWEEN)


def _divisor(operand: int) -> Edge:
    return Edge("h != 0", 1, "", _at_zero, operand, form=_DIVIDED, apart=_ELSE)


# What each of the texts about epsilon does.
_FORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "h.clamp(min=epsilon)": lambda h, epsilon: h.clamp(min=epsilon),
    "h.clamp(min=-1 + epsilon)": lambda h, epsilon: h.clamp(min=-1 + epsilon),
    "h.clamp(-1 + epsilon, 1 - epsilon)": lambda h, epsilon: h.clamp(-1 + epsilon, 1 - epsilon),
    "torch.where(h == 0, epsilon, h)": lambda h, epsilon: torch.where(h == 0, epsilon, h),
}
_, _ABOVE, _BETWEEN, _ELSE = _FORMS

_EDGES = {
    "sqrt": Edge("h > 0", 1, "torch.sqrt(safe)", _up_to_zero),
    "rsqrt": Edge("h > 0", 1, "torch.rsqrt(safe)", _up_to_zero),
    "log": _log("log"),
    "log2": _log("log2"),
    "log10": _log("log10"),
    "log1p": Edge("h > -1", 0, "torch.log1p(safe)", lambda h: h <= -1, rounds=True, apart=_ABOVE),
    "power": Edge("h > 0", 1, "safe**power", _up_to_zero),
    "acos": _arc("acos"),
    "asin": _arc("asin"),
    "atanh": _arc("atanh"),
    "divide": _divisor(1),
    "reciprocal": _divisor(0),
}
_WHOLE_POWER = Edge("h != 0", 1, "safe**power", _at_zero, apart=_ELSE)


def edge_of(word: str, constants: Iterable[float]) -> Edge | None:
    """Returns where an operation has no value or no derivative, None for one that has them.

    Args:
        word: What it is called.
        constants: The numbers that it is called with.

    Example:
        >>> edge_of("power", [-2.0]).taken, edge_of("power", [0.5]).taken
        ('h != 0', 'h > 0')
    """
    known = [*constants]
    whole = word == "power" and known and all(map(float.is_integer, known))
    return _WHOLE_POWER if whole else _EDGES.get(word)
