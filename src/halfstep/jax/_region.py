"""The boundary of a region: gradients are scaled inside of it and true outside."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.custom_derivatives import SymbolicZero

from halfstep.core import Policy
from halfstep.errors import ScaleError
from halfstep.jax._keywords import shown
from halfstep.jax._linear import derivative

# Where nobody adapts the scale, it leaves room for gradients that grow on their way.
UNADAPTED = 1024.0


def initial_scale(policy: Policy, given: Any) -> Any:
    """Returns what gradients that enter are brought to, None for no scaling.

    Args:
        policy: The policy, which needs no scale in float32.
        given: What the user gives instead: a number, or something with a `loss_scale` or `scale`.
    """
    if policy.compute_dtype == "float32":
        return None
    if given is not None:
        return _number(given)
    scale = policy.scale
    starts = {"static": scale.init_scale, "dynamic": min(UNADAPTED, scale.max_scale)}
    return starts.get(scale.kind)


def _number(given: Any) -> Any:
    number = _held(given)
    is_array = isinstance(number, jax.Array) and jax.numpy.ndim(number) == 0
    if not is_array and not _is_positive(number):
        raise ScaleError(
            "autocast needs scale to be a number above 0, an array of one, or something with a"
            f" loss_scale or scale, got {_given(number, given)}. {_remedy(given)}"
        )
    return number


def _given(number: Any, given: Any) -> str:
    """Returns what was given in few words, which may be the whole state of an optimizer."""
    if number is given:
        return shown(given)
    return f"a {type(given).__name__} that holds {shown(number)}"


def _remedy(given: Any) -> str:
    if not isinstance(given, str):
        held = enumerate(given if isinstance(given, tuple) else ())
        place = next((index for index, each in held if hasattr(each, "loss_scale")), None)
        return f"Write scale={'1024.0, for example' if place is None else f'state[{place}]'}."
    with contextlib.suppress(ValueError):
        return f"Write scale={float(given)}, without quotes."
    return (
        "Write for example scale=1024.0; the text form of a rule belongs into the policy, as in"
        " policy='mixed_float16, scale=static(1024.0)'."
    )


def _held(given: Any) -> Any:
    """Returns the number of a state, which may be that of an optimizer with a loss scale."""
    while hasattr(given, "loss_scale"):
        given = given.loss_scale
    scale = getattr(given, "scale", given)
    return given if callable(scale) else scale


def _is_positive(given: Any) -> bool:
    return isinstance(given, int | float | np.number) and bool(0.0 < given < math.inf)


def bounded(
    program: Callable[..., Sequence[Any]], scale: Any, operands: Sequence[Any]
) -> list[Any]:
    """Runs a program as a region.

    Args:
        program: Takes arrays, returns arrays.
        scale: What the sum of the magnitudes of gradients that enter is brought below.
        operands: What it is called with.
    """
    region = jax.custom_jvp(lambda scale, *arrays: list(program(*arrays)))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moves = [not isinstance(each, SymbolicZero) for each in tangents[1:]]
        ways = [each for each in tangents[1:] if not isinstance(each, SymbolicZero)]
        out, found = derivative(primals[0], program, primals[1:], moves, ways)
        return out, _tangents(out, found)

    region.defjvp(rule, symbolic_zeros=True)
    return list(region(jax.numpy.asarray(scale, jax.numpy.float32), *operands))


def _tangents(results: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """Returns a tangent for each result; what is no real number has none."""
    moving = iter(found)
    types = [jax.typeof(each).to_tangent_aval() for each in results]
    return [
        SymbolicZero(each) if each.dtype == jax.dtypes.float0 else next(moving) for each in types
    ]
