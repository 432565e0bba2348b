"""Runs scaled equations of which some are to be handed true numbers.

What such a one gives may be of any size, so it is scaled anew. The factor is handed from equation
to equation, and into and out of the programs that those hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, TypeAlias

import jax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr

from halfstep.errors import UsageError
from halfstep.jax._factor import Factor, brought, choose, lowest, multiplied, shared_axes
from halfstep.jax._interpret import holds_true
from halfstep.jax._private import (
    Literal,
    bind,
    eval_jaxpr,
    located,
    manual_axes,
    trace,
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
        anew: Whether what was handed true numbers is scaled anew where devices have to agree.
        varying: Whether devices have to agree wherever their numbers differ.
    """

    scale: Any
    axes: tuple[str, ...]
    anew: bool = True
    varying: bool = False

    @classmethod
    def of(cls, scale: Any, equations: Sequence[Any]) -> "Around":
        """Returns by what a factor is chosen for these equations."""
        return cls(scale, shared_axes(equations), varying=any(map(holds_true, equations)))

    def chosen(self, arrays: Sequence[Any]) -> Factor:
        """Returns the factor of what enters."""
        return choose(self.scale, arrays, self._axes(arrays))

    def renewed(self, arrays: Sequence[Any], factor: Factor | None) -> Factor:
        """Returns the factor of what was computed of true numbers, which had one before."""
        if factor is not None and not self.anew and self._axes(arrays):
            return factor
        return self.chosen(arrays)

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
        given = read(equation.invars, values)
        if not before and not holds_true(equation):
            values.update(zip(equation.outvars, bind(equation, given), strict=True))
            continue
        factor = lowest(before) if before else None
        for place, atom in enumerate(equation.invars):
            if moves[place]:
                given[place] = brought(given[place], factors[atom], factor)
        out, after = _run(equation, given, moves, factor, around)
        values.update(zip(equation.outvars, out, strict=True))
        factors.update(dict.fromkeys(equation.outvars, after))


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
) -> tuple[list[Any], Factor]:
    """Returns what an equation gives of operands with one factor, and the factor of that."""
    if factor is not None and not holds_true(equation):
        return bind(equation, arrays), factor
    if factor is None:
        factor = Factor(jnp.float32(1), jnp.float32(1))
    return _HANDLERS.get(equation.primitive.name, _refuse)(equation, arrays, moves, factor, around)


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
    after = around.renewed(out, factor)
    return [multiplied(each, after.times) for each in out], after


def _held(closed: Any, moves: Sequence[bool], around: Around) -> Callable[..., list[Any]]:
    """Returns a program that takes a scale and a factor first, and returns a factor first."""
    jaxpr = closed.jaxpr

    def run(scale: Any, times: Any, inverse: Any, *arrays: Any) -> list[Any]:
        factor = Factor(times, inverse)
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *arrays), strict=True))
        factors = dict.fromkeys(compress(jaxpr.invars, moves), factor)
        flow(jaxpr.eqns, values, factors, replace(around, scale=scale))
        found = [factors[atom] for atom in jaxpr.outvars if _is_in(atom, factors)]
        after = lowest(found) if found else factor
        return [*after, *(_with(after, atom, values, factors) for atom in jaxpr.outvars)]

    return run


def _with(after: Factor, atom: Any, values: Any, factors: dict[Any, Factor]) -> Any:
    (array,) = read([atom], values)
    if _is_in(atom, factors):
        return brought(array, factors[atom], after)
    # What does not depend on what enters is zero, or counts something.
    is_real = jnp.issubdtype(array.dtype, jnp.inexact)
    return multiplied(array, after.times) if is_real else array


def _parts(out: Sequence[Any]) -> tuple[list[Any], Factor]:
    return list(out[2:]), Factor(*out[:2])


def _run_call(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    params = equation.params
    run = _held(params["jaxpr" if "jaxpr" in params else "call_jaxpr"], moves, around)
    with located(equation):
        return _parts(jax.jit(run)(around.scale, *factor, *arrays))


def _run_checkpoint(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    jaxpr, first = equation.params["jaxpr"], (around.scale, *factor)
    run = _held(ClosedJaxpr(jaxpr, ()), moves, around)
    avals = [*map(jax.typeof, first), *(var.aval for var in jaxpr.invars)]
    closed = trace(run, jaxpr, avals)
    operands = [*closed.consts, *first, *arrays]
    return _parts(bind(equation, operands, jaxpr=without_consts(closed.jaxpr)))


def _run_cond(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    # Devices that take different branches cannot agree on anything in there.
    inside = replace(around, anew=False)
    branches = [_held(each, moves[1:], inside) for each in equation.params["branches"]]
    index, *given = arrays
    with located(equation):
        return _parts(jax.lax.switch(index, branches, around.scale, *factor, *given))


def _run_scan(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    params = equation.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, rows = arrays[:first], arrays[first:last], arrays[last:]
    real = [jnp.issubdtype(each.dtype, jnp.inexact) for each in carry]
    run = _held(params["jaxpr"], [*moves[:first], *real, *moves[last:]], around)

    def turn(state: Any, row: Any) -> Any:
        out = run(around.scale, *state[:2], *consts, *state[2:], *row)
        count = len(state)
        return tuple(out[:count]), (*out[:2], *out[count:])

    scaled = [
        each if does or not is_real else multiplied(each, factor.times)
        for each, does, is_real in zip(carry, moves[first:last], real, strict=True)
    ]
    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    with located(equation):
        state, stacked = jax.lax.scan(turn, (*factor, *scaled), tuple(rows), **options)
    return _level(state, stacked)


def _level(state: Sequence[Any], stacked: Sequence[Any]) -> tuple[list[Any], Factor]:
    """Returns what a loop gives with one factor, where each turn had its own."""
    (last, before), (turns, row) = _parts(state)[::-1], _parts(stacked)[::-1]
    smallest = jnp.min(turns.times, initial=last.times)
    after = Factor(smallest, jnp.max(turns.inverse, initial=last.inverse))
    ratio = turns.inverse * after.times
    rows = [multiplied(each, jnp.expand_dims(ratio, range(1, each.ndim))) for each in row]
    return [*(brought(each, last, after) for each in before), *rows], after


def _run_shard_map(
    equation: Any, arrays: Sequence[Any], moves: Sequence[bool], factor: Factor, around: Around
) -> tuple[list[Any], Factor]:
    params, axes = equation.params, manual_axes(equation)
    inside = replace(around, axes=tuple(dict.fromkeys((*around.axes, *axes))))
    mapped = jax.shard_map(
        _held(ClosedJaxpr(params["jaxpr"], ()), moves, inside),
        mesh=params["mesh"],
        in_specs=(_ONE, _ONE, _ONE, *params["in_specs"]),
        out_specs=[_ONE, _ONE, *params["out_specs"]],
        axis_names=axes,
        check_vma=params["check_vma"],
    )
    with located(equation):
        return _parts(mapped(around.scale, *factor, *arrays))


_NAMES: dict[str, Handler] = {
    "halfstep_true halfstep_linear": _run_true,
    "jit pjit closed_call core_call": _run_call,
    "remat2 checkpoint remat": _run_checkpoint,
    "cond": _run_cond,
    "scan": _run_scan,
    "shard_map": _run_shard_map,
}
_HANDLERS = {name: handler for names, handler in _NAMES.items() for name in names.split()}
