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
_MOVED = """\
safe = torch.where({taken}, h, {call})  # h is what goes into {word}
torch.{word}(safe)  # in place of what {word} returns"""
# An angle is not left out either, for that at -1 may be the largest of all, and it is right.
_INSIDE = """\
safe, ends = torch.where({taken}, h, {instead}), h.detach().clamp(-1, 1)  # h goes into {word}
torch.where({taken}, torch.{word}(safe), torch.{word}(ends))  # in place of what {word} returns"""
_POWER = """\
taken = {taken}
safe = torch.where(taken, h, {instead})  # h is what goes into {word}
torch.where(taken, {call}, 0)  # in place of what {word} returns"""
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
        call: The operation, as text about `safe`; for the form that calls it by its name, what
            takes the place of h at the edge.
        is_there: Whether numbers are at the edge, one by one.
        operand: Which of the operands is meant.
        rounds: Whether it is met where a number near 1 is rounded to 1, and not only near 0.
        form: How it is kept off, as text about the others.
        apart: How numbers are kept apart from it by epsilon, as text about h; empty where what the
            operation has at the edge is right, and only its derivative is not there.
    """

    taken: str
    instead: float
    call: str
    is_there: Callable[[Any], Any]
    operand: int = 0
    rounds: bool = False
    form: str = _SAFE
    apart: str = ""

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


def _up_to_minus_one(h: Any) -> Any:
    return h <= -1


def _log(end: str, least: float, is_there: Callable[[Any], Any], apart: str) -> Edge:
    taken, least_text = f"h > {end}", _LEAST[end]
    return Edge(taken, least, least_text, is_there, rounds=True, form=_MOVED, apart=apart)


def _divisor(operand: int) -> Edge:
    return Edge("h != 0", 1, "", _at_zero, operand, form=_DIVIDED, apart=_ELSE)


# What each of the texts about epsilon does. None moves a number that is not at the edge.
_FORMS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "torch.where(h > 0, h, epsilon)": lambda h, eps: torch.where(h > 0, h, eps),
    "torch.where(h > -1, h, -1 + epsilon)": lambda h, eps: torch.where(h > -1, h, -1 + eps),
    "torch.where(h.abs() < 1, h, h.sign() * (1 - epsilon))": (
        lambda h, eps: torch.where(h.abs() < 1, h, h.sign() * (1 - eps))
    ),
    "torch.where(h == 0, epsilon, h)": lambda h, eps: torch.where(h == 0, eps, h),
}
_ABOVE, _ABOVE_MINUS_ONE, _BETWEEN, _ELSE = _FORMS
_LEAST = {"0": "torch.finfo(h.dtype).tiny", "-1": "-1 + torch.finfo(h.dtype).eps"}
_LOG = _log("0", 2.0**-14, _up_to_zero, _ABOVE)
_ARC = Edge("h.abs() < 1", 0, "", _from_one, rounds=True, form=_INSIDE)

_EDGES = {
    "sqrt": Edge("h > 0", 1, "torch.sqrt(safe)", _up_to_zero),
    "rsqrt": Edge("h > 0", 1, "torch.rsqrt(safe)", _up_to_zero, apart=_ABOVE),
    **dict.fromkeys(("log", "log2", "log10"), _LOG),
    "log1p": _log("-1", -1 + 2.0**-7, _up_to_minus_one, _ABOVE_MINUS_ONE),
    "acos": _ARC,
    "asin": _ARC,
    "atanh": Edge(
        "h.abs() < 1",
        1 - 2.0**-7,
        "h.sign() * (1 - torch.finfo(h.dtype).eps)",
        _from_one,
        rounds=True,
        form=_MOVED,
        apart=_BETWEEN,
    ),
    "divide": _divisor(1),
    "reciprocal": _divisor(0),
}
_ROOT = Edge("h > 0", 1, "safe**power", _up_to_zero)
_WHOLE_POWER = Edge("h != 0", 1, "safe**power", _at_zero, apart=_ELSE)
# The powers of a tensor may be of either kind.
_WHOLE = "(power % 1 == 0) & ((h != 0) | (power >= 0))"
_ANY_POWER = Edge(f"(h > 0) | {_WHOLE}", 1, "safe**power", _at_zero, form=_POWER)


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
    if word != "power":
        return _EDGES.get(word)
    if not known:
        return _ANY_POWER
    whole = all(map(float.is_integer, known))
    return (_WHOLE_POWER if min(known) < 0 else None) if whole else _ROOT
