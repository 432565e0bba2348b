"""Which of what was seen is a fault."""

import math
from collections.abc import Iterator

from halfstep.core import Format
from halfstep.torch._observing._ran import Key, Ran, Value
from halfstep.torch._observing._step import Step

# More than half of the numbers are lost, and none is so much larger than what the format holds with
# all of its digits that the others would not matter.
_LOST, _MATTERS = 0.5, 16.0
# What is so much smaller than the product of what it is computed of has cancelled out.
_ROUNDING = 2.0**-16
_PRODUCTS = ("add", "attention", "conv", "matmul", "multiply", "softmax", "subtract")
# What nobody computes is written down, as in a mask.
_WRITTEN = -1e5


def faults(step: Step, in_float32: Step) -> list[Ran]:
    """Returns the operations that made inf or NaN of finite numbers, in order.

    What the same step makes in float32 and goes on with finite numbers is meant to be there, such
    as a mask of -inf; so is -inf in place of a number that is written down for the same purpose.

    Args:
        step: What happened.
        in_float32: What happened in float32.
    """
    if not step.finite:
        data = [each for each in step.ran if each.entered and _is_bad(each)]
        if data:
            return _once(data)
    keys = keys_of(in_float32)
    there = [each for each in step.made if not _is_meant(each, step, in_float32, keys)]
    fresh = [each for each in there if each.fresh]
    if fresh or step.finite:
        return _once(fresh)
    return (there or _handing_on(step, "backward") or _handing_on(step, "forward"))[:1]


def _handing_on(step: Step, phase: str) -> list[Ran]:
    """Returns what hands on what is not finite: it goes by what was hidden, or was written so."""
    return [each for each in step.ran if each.bad and each.key.phase == phase]


def keys_of(in_float32: Step) -> frozenset[Key]:
    """Returns what float32 makes, too; what is cast by hand is not in float32 even there."""
    return frozenset(each.key for each in in_float32.made if not each.low)


def is_in_float32(ran: Ran, in_float32: Step) -> bool:
    """Returns whether a fault is there in float32, too."""
    bad = {each.key for each in in_float32.ran if each.bad}
    if ran.entered:
        return ran.key in bad or not in_float32.ran
    return ran.key in keys_of(in_float32) or (ran.made is None and ran.key in bad)


def _once(found: list[Ran]) -> list[Ran]:
    named = {(each.key.path, each.key.word): each for each in reversed(found)}
    return [each for each in found if any(each is other for other in named.values())]


def _is_bad(entered: Ran) -> bool:
    held = entered.outputs[0].held
    return held is not None and not held.finite and not held.only_minus_inf


def _is_meant(made: Ran, step: Step, in_float32: Step, keys: frozenset[Key]) -> bool:
    phase = made.key.phase
    return (made.key in keys and in_float32.finite_in(phase)) or (_masks(made) and step.finite)


def _masks(made: Ran) -> bool:
    """Returns whether it may be what a mask is made of."""
    held = made.outputs[0].held
    if held is None or not held.only_minus_inf:
        return False
    limit = Format.named(made.outputs[0].dtype).max
    beyond = any(abs(each) > limit for each in made.constants)
    written = made.key.word == "cast" and any(
        each.held is not None and each.held.low <= _WRITTEN for each in made.inputs
    )
    return made.key.word == "where" or beyond or written


def underflows(step: Step, in_float32: Step) -> Iterator[tuple[Ran, Value]]:
    """Yields the operations of the way back that lost most of a gradient, and what is left of it.

    Args:
        step: What happened.
        in_float32: What happened in float32.
    """
    wide = {each.key: each for each in in_float32.ran}
    for each in step.ran:
        if each.key.phase == "backward" and each.low:
            whole = each.inputs if each.key.word == "cast" else _kept(each, wide.get(each.key))
            for value, full in zip(each.outputs, whole, strict=False):
                if _is_lost(value, full):
                    yield each, value


def _kept(ran: Ran, full: Ran | None) -> tuple[Value, ...]:
    """Returns what float32 computed, nothing where a gradient was lost before it came."""
    return () if full is None or _came_lost(ran, full) else _outputs(full)


def _came_lost(ran: Ran, full: Ran) -> bool:
    pairs = zip(ran.inputs, full.inputs, strict=False)
    came = [
        (value.held.nonzeros, whole.held.nonzeros)
        for value, whole in pairs
        if value.role.startswith("grad") and value.held and whole.held
    ]
    return any(left == 0 or left < there * _LOST for left, there in came)


def _outputs(ran: Ran) -> tuple[Value, ...]:
    """Returns what float32 computed, but for what are only its own errors of rounding."""
    read = [each.held.largest or 0.0 for each in ran.inputs if each.held]
    least = math.prod(read) * _ROUNDING if ran.key.word in _PRODUCTS else 0.0
    return tuple(
        each
        if each.held is None or (each.held.largest or 0.0) >= least
        else each._replace(held=None)
        for each in ran.outputs
    )


def _is_lost(value: Value, full: Value) -> bool:
    if value.held is None or full.held is None or value.shape != full.shape:
        return False
    there, left = full.held.nonzeros, value.held.nonzeros
    largest = full.held.largest
    small = largest is not None and largest < _MATTERS * Format.named(value.dtype).min_normal
    return small and there > 0 and left < there * _LOST
