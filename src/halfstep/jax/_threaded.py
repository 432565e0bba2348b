"""Runs scaled equations of which some are to be handed true numbers.

What such a one gives may be of any size, so it is scaled anew. The factor is handed from equation
to equation, and into and out of the programs that those hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, TypeAlias

import jax
from jax import lax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr

from halfstep.errors import UsageError
from halfstep.jax._factor import Factor, brought, choose, lowest, multiplied, neutral, shared_axes
from halfstep.jax._interpret import holds_true
from halfstep.jax._primitives import linear_p, true_p
from halfstep.jax._private import (
    Literal,
    bind,
    located,
    manual_axes,
    trace,
    varying,
    varying_axes,
    without_consts,
)

_ONE = jax.P()


@dataclass(frozen=True)
class Around:
    """By what factors are chosen.

    Args:
        scale: What the sum of magnitudes is brought below.
        axes: The mesh axes over which all devices must choose the same factor.
        varying: Whether devices have to agree wherever their numbers differ.
    """

    scale: Any
    axes: tuple[str, ...]
    varying: bool = False

    @classmethod
    def of(cls, scale: Any, equations: Sequence[Any]) -> "Around":
        """Returns by what a factor is chosen for these equations."""
        return cls(scale, shared_axes(equations), varying=any(map(holds_true, equations)))

    def factors(self, arrays: Sequence[Any]) -> list[Factor]:
        """Returns the factors of what enters: one, unless it may be of very different size."""
        if self.varying:
            return [self.chosen([each]) for each in arrays]
        return [self.chosen(arrays)] * len(arrays)

    def agreed(self, arrays: Sequence[Any], factor: Factor) -> tuple[list[Any], Factor]:
        """Returns arrays with a factor for all devices, where each had one of its own."""
        axes = self._axes(arrays)
        if not axes:
            return list(arrays), factor
        after = Factor(lax.pmin(factor.times, axes), lax.pmax(factor.inverse, axes))
        return [brought(each, factor, after) if _is_real(each) else each for each in arrays], after

    def chosen(self, arrays: Sequence[Any]) -> Factor:
        """Returns one factor for arrays."""
        return choose(self.scale, arrays, self._axes(arrays))

    def _axes(self, arrays: Sequence[Any]) -> tuple[str, ...]:
        if not self.varying:
            return self.axes
        return tuple(dict.fromkeys((*self.axes, *varying_axes(arrays))))


Handler: TypeAlias = Callable[
    [Any, Sequence[Any], Sequence[bool], Factor, Around], tuple[list[Any], Factor]
]


def flow(
    equations: Sequence[Any], values: dict[Any, Any], factors: dict[Any, Factor], around: Around
) -> None:
    """Runs equations.

    Args:
        equations: The equations.
        values: The values of variables, to which those of the equations are added.
        factors: The factors of those that are scaled, likewise.
        around: By what factors are chosen.
    """
    for equation in equations:
        moves = [_is_in(atom, factors) for atom in equation.invars]
        before = [factors[atom] for atom in compress(equation.invars, moves)]
        factor = lowest(before) if before else None
        given = read(equation.invars, values)
        for place in compress(range(len(moves)), moves):
            given[place] = brought(given[place], factors[equation.invars[place]], factor)
        out, after = _run(equation, given, moves, factor, around)
        values.update(zip(equation.outvars, out, strict=True))
        factors.update({var: after for var in equation.outvars if after is not None})


def read(atoms: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    """Returns the values of variables and literals."""
    return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]


def _is_in(atom: Any, variables: Any) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _run(
    equation: Any,
    arrays: Sequence[Any],
    moves: Sequence[bool],
    factor: Factor | None,
    around: Around,
) -> tuple[list[Any], Factor | None]:
    """Returns what an equation gives of operands with one factor, and the factor of that."""
    if not holds_true(equation):
        return bind(equation, arrays), factor
    handler = _HANDLERS.get(equation.primitive.name, _refuse)
    return handler(equation, arrays, moves, factor or neutral(), around)


def _refuse(equation: Any, *_: Any) -> tuple[list[Any], Factor]:
    raise UsageError(
        "autocast needs a backward of a custom_vjp that is not linear, such as a clip, to be plain"
        " or inside of jit, scan, cond, checkpoint or shard_map, to hand it gradients that are not"
        f" scaled, got one inside of {equation.primitive.name}. Write policy='mixed_bfloat16',"
        " which scales nothing, or call that function outside of the region."
    )


def _run_true(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    """Hands true numbers to what needs them, which may be another region."""
    pairs = zip(arrays, moves, strict=True)
    true = [multiplied(each, factor.inverse) if does else each for each, does in pairs]
    out = bind(equation, true)
    after = around.chosen(out)
    return [multiplied(each, after.times) for each in out], after


def _held(
    closed: Any, moves: Sequence[bool], around: Around
) -> Callable[..., tuple[Factor, list[Any]]]:
    """Returns a program that takes a scale and the factor of what moves, and returns a factor."""

    def run(scale: Any, factor: Factor, *arrays: Any) -> tuple[Factor, list[Any]]:
        factors = [factor if does else None for does in moves]
        return _run_program(closed, arrays, factors, replace(around, scale=scale))

    return run


def _run_program(
    closed: Any, arrays: Sequence[Any], given: Sequence[Factor | None], around: Around
) -> tuple[Factor, list[Any]]:
    """Returns what a program gives, which is brought to one factor, and that factor."""
    jaxpr = closed.jaxpr
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arrays), strict=True))
    factors = {var: each for var, each in zip(jaxpr.invars, given, strict=True) if each is not None}
    start = lowest(list(factors.values())) if factors else neutral()
    flow(jaxpr.eqns, values, factors, around)
    found = [factors[atom] for atom in jaxpr.outvars if _is_in(atom, factors)]
    after = lowest(found) if found else start
    return after, [_with(after, atom, values, factors) for atom in jaxpr.outvars]


def _with(after: Factor, atom: Any, values: Any, factors: dict[Any, Factor]) -> Any:
    (array,) = read([atom], values)
    if _is_in(atom, factors):
        return brought(array, factors[atom], after)
    # What does not depend on what enters is zero, or counts something.
    return multiplied(array, after.times) if _is_real(array) else array


def _is_real(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))


def _run_call(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    params = equation.params
    run = _held(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], moves, around)
    with located(equation):
        after, out = jax.jit(run)(around.scale, factor, *arrays)
    return out, after


def _run_checkpoint(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    jaxpr, first = equation.params["jaxpr"], (around.scale, *factor)
    run = _held(ClosedJaxpr(jaxpr, ()), moves, around)

    def flat(scale: Any, times: Any, inverse: Any, *given: Any) -> list[Any]:
        after, out = run(scale, Factor(times, inverse), *given)
        return [*after, *out]

    closed = trace(flat, jaxpr, [*map(jax.typeof, first), *(var.aval for var in jaxpr.invars)])
    operands = [*closed.consts, *first, *arrays]
    times, inverse, *out = bind(equation, operands, jaxpr=without_consts(closed.jaxpr))
    return out, Factor(times, inverse)


def _run_cond(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    branches, (index, *given) = equation.params["branches"], arrays
    # Devices that combine values in there take the same branch; others may not.
    held = (inner for each in branches for inner in each.jaxpr.eqns)
    axes = shared_axes(held, but="pvary pcast axis_index")
    inside = replace(around, axes=axes, varying=False)
    apart = [axis for axis in varying_axes(given) if axis not in axes]
    programs = [_varying(_held(each, moves[1:], inside), apart) for each in branches]
    with located(equation):
        after, out = lax.switch(index, programs, around.scale, factor, *given)
    return around.agreed(out, after)


def _varying(program: Callable[..., Any], axes: Sequence[str]) -> Callable[..., Any]:
    """Returns a program whose results have one type, whatever they are made of."""
    return lambda *arrays: jax.tree.map(lambda each: varying(each, axes), program(*arrays))


def _run_scan(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    params = equation.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, rows = arrays[:first], arrays[first:last], arrays[last:]
    before = [factor if does else None for does in moves]

    def turn(state: tuple[Factor, list[Any]], row: Any) -> Any:
        carried = [state[0] if _is_real(each) else None for each in state[1]]
        factors = [*before[:first], *carried, *before[last:]]
        after, out = _run_program(params["jaxpr"], [*consts, *state[1], *row], factors, around)
        return (after, out[: len(carry)]), (after, out[len(carry) :])

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    start = factor, list(map(_started, carry, before[first:last], [factor] * len(carry)))
    with located(equation):
        return _level(*lax.scan(turn, start, list(rows), **options))


def _started(array: Any, before: Factor | None, factor: Factor) -> Any:
    """Returns what a loop starts from, which adds up gradients even if it is none yet."""
    return multiplied(array, factor.times) if before is None and _is_real(array) else array


def _level(
    state: tuple[Factor, list[Any]], turns: tuple[Factor, list[Any]]
) -> tuple[list[Any], Factor]:
    """Returns what a loop gives with one factor, where each turn had its own."""
    (last, carry), (each, rows) = state, turns
    smallest = jnp.min(each.times, initial=last.times)
    after = Factor(smallest, jnp.max(each.inverse, initial=last.inverse))
    ratio = each.inverse * after.times
    level = [multiplied(row, jnp.expand_dims(ratio, range(1, row.ndim))) for row in rows]
    return [*(brought(array, last, after) for array in carry), *level], after


def _run_shard_map(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    params, axes = equation.params, manual_axes(equation)
    inside = replace(around, axes=tuple(dict.fromkeys((*around.axes, *axes))))
    mapped = jax.shard_map(
        _held(ClosedJaxpr(params["jaxpr"], ()), moves, inside),
        mesh=params["mesh"],
        in_specs=(_ONE, _ONE, *params["in_specs"]),
        out_specs=(_ONE, list(params["out_specs"])),
        axis_names=axes,
        check_vma=params["check_vma"],
    )
    with located(equation):
        after, out = mapped(around.scale, factor, *arrays)
    return out, after


_NAMES: dict[str, Handler] = {
    f"{true_p.name} {linear_p.name}": _run_true,
    "jit pjit closed_call core_call": _run_call,
    "remat2 checkpoint remat": _run_checkpoint,
    "cond": _run_cond,
    "scan": _run_scan,
    "shard_map": _run_shard_map,
}
_HANDLERS = {name: handler for names, handler in _NAMES.items() for name in names.split()}
