"""Which power of a factor comes out of a backward whose cotangents are multiplied by it.

A derivative gives that factor back. What clips, or divides by a norm, does not, and so has to be
handed cotangents that nothing has scaled.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax import numpy as jnp

from halfstep.jax._interpret import _degree_names as names
from halfstep.jax._ops import plain_name
from halfstep.jax._primitives import linear_p
from halfstep.jax._private import Literal

Degree: TypeAlias = float | str
Rule: TypeAlias = Callable[[Any, list[Degree]], list[Degree]]

# Zero, inf and NaN, which stay the same whatever they are multiplied by.
ANY = "any"
MIXED = "mixed"
_CONSTANT = (0.0, ANY)

_BITS, _EXPONENT = 16, 5  # of float16


class _ObservedError(Exception):
    """The host is told of numbers that are scaled."""


def is_homogeneous(closed: Any, held: int) -> bool:
    """Returns whether a backward gives back the factor that its cotangents are multiplied by.

    Args:
        closed: The backward, which takes what was kept, then the cotangents.
        held: How many operands were kept.
    """
    cotangents = len(closed.in_avals) - held
    try:
        found = degrees(closed.jaxpr, [0.0] * held + [1.0] * cotangents)
    except _ObservedError:
        return False
    return all(each in (1.0, ANY) for each in found)


def degrees(jaxpr: Any, operands: Sequence[Degree]) -> list[Degree]:
    """Returns the degrees of what a program gives, for those of its operands."""
    known: dict[Any, Degree] = dict.fromkeys(jaxpr.constvars, 0.0)
    known |= dict(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Degree:
        return _of_literal(atom.val) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        found = _degrees(equation, list(map(read, equation.invars)))
        known.update(zip(equation.outvars, found, strict=True))
    return list(map(read, jaxpr.outvars))


def _of_literal(given: Any) -> Degree:
    array = np.asarray(given)
    if array.dtype == np.bool_:
        return 0.0
    with np.errstate(all="ignore"):
        return ANY if np.all((array + array == array) | (array != array)) else 0.0


def _degrees(equation: Any, given: list[Degree]) -> list[Degree]:
    if all(each == 0.0 for each in given):
        return [0.0] * len(equation.outvars)
    return _RULES.get(plain_name(equation.primitive.name), _other)(equation, given)


def _join(given: Sequence[Degree]) -> Degree:
    different = set(given) - {ANY}
    if len(different) > 1:
        return MIXED
    return different.pop() if different else ANY


def _sum(given: Sequence[Degree]) -> Degree:
    if MIXED in given:
        return MIXED
    return ANY if ANY in given else float(sum(map(float, given)))


def _is_constant(given: Sequence[Degree]) -> bool:
    return all(each in _CONSTANT for each in given)


def _other(equation: Any, given: list[Degree]) -> list[Degree]:
    return [0.0 if _is_constant(given) else MIXED] * len(equation.outvars)


def _joined(equation: Any, given: list[Degree]) -> list[Degree]:
    return [_join(given)]


def _kept(equation: Any, given: list[Degree]) -> list[Degree]:
    """Returns the degree of the first operand; the others say where."""
    first, *others = given
    return [first if _is_constant(others) else MIXED] * len(equation.outvars)


def _each(equation: Any, given: list[Degree]) -> list[Degree]:
    return given


def _multiplied(equation: Any, given: list[Degree]) -> list[Degree]:
    return [_sum(given)]


def _compared(equation: Any, given: list[Degree]) -> list[Degree]:
    return [MIXED if _join(given) == MIXED else 0.0]


def _opaque(equation: Any, given: list[Degree]) -> list[Degree]:
    found = _join([each for each in given if each not in _CONSTANT])
    return [0.0 if found == ANY else found] * len(equation.outvars)


def _observing(equation: Any, given: list[Degree]) -> list[Degree]:
    if _is_constant(given):
        return _other(equation, given)
    raise _ObservedError


def _converted(equation: Any, given: list[Degree]) -> list[Degree]:
    dtype = equation.params["new_dtype"]
    if dtype == np.bool_:
        return _compared(equation, given)
    if not jnp.issubdtype(dtype, np.inexact):
        return _other(equation, given)
    return _rounded(equation, given, wide=jnp.finfo(dtype).bits >= _BITS)


def _rounded(equation: Any, given: list[Degree], *, wide: bool) -> list[Degree]:
    # Formats of 8 bits end so near that it shows how large a number is.
    return given if wide else _other(equation, given)


def _cut(equation: Any, given: list[Degree]) -> list[Degree]:
    return _rounded(equation, given, wide=equation.params["exponent_bits"] >= _EXPONENT)


def _divided(equation: Any, given: list[Degree]) -> list[Degree]:
    return [_sum([given[0], _times(given[1], -1.0)])]


def _solved(equation: Any, given: list[Degree]) -> list[Degree]:
    return _divided(equation, given[::-1])


def _times(degree: Degree, power: float) -> Degree:
    """Returns the degree of a power."""
    if power == 0.0:
        return MIXED if degree == MIXED else 0.0
    return degree if isinstance(degree, str) else degree * power


def _to_the(power: Callable[[Any], float]) -> Rule:
    return lambda equation, given: [_times(given[0], power(equation))]


def _to_any(equation: Any, given: list[Degree]) -> list[Degree]:
    exponent = equation.invars[1]
    if isinstance(exponent, Literal):
        return [_times(given[0], float(np.asarray(exponent.val)))]
    return _other(equation, given)


def _selected(equation: Any, given: list[Degree]) -> list[Degree]:
    which, *cases = given
    return [_join(cases) if which in _CONSTANT else MIXED]


def _scattered(equation: Any, given: list[Degree]) -> list[Degree]:
    operand, places, updates = given
    return [_join([operand, updates]) if places in _CONSTANT else MIXED]


def _placed(equation: Any, given: list[Degree]) -> list[Degree]:
    return [_join(given[:2]) if _is_constant(given[2:]) else MIXED]


def _pooled(equation: Any, given: list[Degree]) -> list[Degree]:
    moved, compared = given
    return [MIXED if compared == MIXED else moved]


def _sorted(equation: Any, given: list[Degree]) -> list[Degree]:
    keys = given[: equation.params["num_keys"]]
    return [MIXED] * len(given) if MIXED in keys else given


def _largest(equation: Any, given: list[Degree]) -> list[Degree]:
    return [given[0], *_compared(equation, given)]


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _called(equation: Any, given: list[Degree]) -> list[Degree]:
    held = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "call"))
    return degrees(_open(next(each for each in held if each is not None)), given)


def _region(equation: Any, given: list[Degree]) -> list[Degree]:
    scale, *operands = given
    found = degrees(_open(equation.params["jaxpr"]), operands)
    return found if scale in _CONSTANT else [MIXED] * len(found)


def _branched(equation: Any, given: list[Degree]) -> list[Degree]:
    which, *operands = given
    found = [degrees(_open(each), operands) for each in equation.params["branches"]]
    joined = [_join(each) for each in zip(*found, strict=True)]
    return joined if which in _CONSTANT else [MIXED] * len(joined)


def _scanned(equation: Any, given: list[Degree]) -> list[Degree]:
    params = equation.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]

    def turn(carry: list[Degree]) -> list[Degree]:
        return degrees(_open(params["jaxpr"]), [*given[:first], *carry, *given[last:]])

    carry = _settled(turn, given[first:last])
    return [*carry, *turn(carry)[len(carry) :]]


def _looped(equation: Any, given: list[Degree]) -> list[Degree]:
    params = equation.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    body = _open(params["body_jaxpr"])
    carry = _settled(lambda carry: degrees(body, [*given[first:last], *carry]), given[last:])
    (ends,) = degrees(_open(params["cond_jaxpr"]), [*given[:first], *carry])
    return carry if ends in _CONSTANT else [MIXED] * len(carry)


def _settled(turn: Callable[[list[Degree]], list[Degree]], carry: list[Degree]) -> list[Degree]:
    """Returns the degrees that a loop hands on, in whichever turn."""
    while True:
        out = turn(carry)[: len(carry)]
        joined = [_join(pair) for pair in zip(carry, out, strict=True)]
        if joined == carry:
            return carry
        carry = joined


_LISTS: dict[str, Rule] = {
    names.JOINED: _joined,
    names.KEPT: _kept,
    names.EACH: _each,
    names.MULTIPLIED: _multiplied,
    names.COMPARED: _compared,
    names.CALLED: _called,
    names.OPAQUE: _opaque,
    names.OBSERVING: _observing,
    "scatter scatter_add scatter_sub scatter_min scatter_max": _scattered,
    "select_and_scatter_add select_and_gather_add": _pooled,
}

_RULES: dict[str, Rule] = {
    **{name: rule for each, rule in _LISTS.items() for name in each.split()},
    "convert_element_type": _converted,
    "reduce_precision": _cut,
    "div": _divided,
    "triangular_solve": _solved,
    "square": _to_the(lambda equation: 2.0),
    "sqrt": _to_the(lambda equation: 0.5),
    "rsqrt": _to_the(lambda equation: -0.5),
    "cbrt": _to_the(lambda equation: 1.0 / 3.0),
    "integer_pow": _to_the(lambda equation: float(equation.params["y"])),
    "pow": _to_any,
    "select_n": _selected,
    "dynamic_update_slice": _placed,
    "sort": _sorted,
    "top_k": _largest,
    linear_p.name: _region,
    "cond": _branched,
    "scan": _scanned,
    "while": _looped,
}
