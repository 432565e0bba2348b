"""Runs a linear program on numbers that are scaled where they enter a low format.

What comes before that, such as the derivative of a loss that is computed in float32, has range
enough; only behind it is known how large the numbers are that the low format is to hold.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from halfstep.jax._factor import Factor, times
from halfstep.jax._interpret import holds_true, is_low
from halfstep.jax._private import Literal, bind, sub_jaxprs
from halfstep.jax._threaded import Around, flow, read


@dataclass(frozen=True)
class _Parts:
    """A program in two parts.

    Args:
        early: What runs before anything enters a low format.
        late: What runs after it.
        moving: The variables that depend on what enters.
        entering: Those that the late part takes from the early one.
        scaled: Those that the late part computes.
    """

    early: list[Any]
    late: list[Any]
    entering: list[Any]
    scaled: set[Any]


def run_scaled(jaxpr: Any, held: Sequence[Any], moving: Sequence[Any], scale: Any) -> list[Any]:
    """Returns what a linear program gives, computed of scaled numbers.

    Args:
        jaxpr: The program, without constants.
        held: The values that it depends on otherwise.
        moving: What it is linear in.
        scale: What the sum of magnitudes that enters a low format is brought below.
    """
    parts, values = _begun(jaxpr, held, moving)
    if not parts.entering:
        _run(parts.late, values)
        return read(jaxpr.outvars, values)
    around = Around.of(scale, parts.late)
    factors = _factors(parts, values, around)
    inside = values | {var: times(factors[var].times, [values[var]])[0] for var in parts.entering}
    flow(parts.late, inside, factors, around)
    out = read(jaxpr.outvars, inside | values)
    return [
        times(factors[atom].inverse, [each])[0] if _in(atom, parts.scaled) else each
        for atom, each in zip(jaxpr.outvars, out, strict=True)
    ]


def factors_of(jaxpr: Any, held: Sequence[Any], moving: Sequence[Any], scale: Any) -> list[Factor]:
    """Returns by what such a program multiplies what enters a low format.

    Args:
        jaxpr: The program, without constants.
        held: The values that it depends on otherwise.
        moving: What it is linear in.
        scale: What the sum of magnitudes that enters a low format is brought below.
    """
    parts, values = _begun(jaxpr, held, moving)
    return list(_factors(parts, values, Around.of(scale, parts.late)).values())


def _begun(jaxpr: Any, held: Sequence[Any], moving: Sequence[Any]) -> tuple[_Parts, dict[Any, Any]]:
    """Returns the parts of a program, and the values once the early one has run."""
    parts = _parts(jaxpr, len(held))
    values = dict(zip(jaxpr.invars, (*held, *moving), strict=True))
    _run(parts.early, values)
    return parts, values


def _factors(parts: _Parts, values: dict[Any, Any], around: Around) -> dict[Any, Factor]:
    entering = [values[var] for var in parts.entering]
    return dict(zip(parts.entering, around.factors(entering), strict=True))


def _parts(jaxpr: Any, held: int) -> _Parts:
    moving, scaled = set(jaxpr.invars[held:]), set[Any]()
    early, late = list[Any](), list[Any]()
    entering: dict[Any, None] = {}
    for equation in jaxpr.eqns:
        moved = [atom for atom in equation.invars if _in(atom, moving)]
        is_late = bool(moved) and (any(var in scaled for var in moved) or touches_low(equation))
        (late if is_late else early).append(equation)
        if moved or holds_true(equation):
            moving.update(equation.outvars)
        if is_late:
            scaled.update(equation.outvars)
            entering.update(dict.fromkeys(var for var in moved if var not in scaled))
    return _Parts(early, late, list(entering), scaled)


def _in(atom: Any, variables: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def touches_low(equation: Any) -> bool:
    """Returns whether an equation, or a program that it holds, has numbers in a low format."""
    atoms = (*equation.invars, *equation.outvars)
    return any(is_low(getattr(atom.aval, "dtype", None)) for atom in atoms) or any(
        map(touches_low, _held(equation))
    )


def _held(equation: Any) -> Iterable[Any]:
    return (inner for jaxpr in sub_jaxprs(equation.params) for inner in jaxpr.eqns)


def _run(equations: Sequence[Any], values: dict[Any, Any]) -> None:
    for equation in equations:
        out = bind(equation, read(equation.invars, values))
        values.update(zip(equation.outvars, out, strict=True))
