"""Calls, branches and loops, which are gone through as they run."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr

from halfstep.jax._diagnosing._formats import run_part
from halfstep.jax._diagnosing._made import Value, value
from halfstep.jax._diagnosing._place import Place
from halfstep.jax._diagnosing._run import HANDLERS, Handler, Run
from halfstep.jax._primitives import linear_p, true_p
from halfstep.jax._scaled import factors_of

# A loop of so many turns is gone through as a whole, whatever is looked for.
_ALL_TURNS = 64


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


@_handles(
    *("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "remat"),
    *("custom_jvp_call", "custom_vjp_call", true_p.name),
)
def run_call(run: Run, equation: Any, operands: list[Value], place: Place) -> list[Value]:
    """Goes through a program that is called."""
    params = equation.params
    called = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    closed = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
    return run.closed(closed, operands, place.inside(equation))


@_handles(linear_p.name)
def run_linear(run: Run, equation: Any, operands: list[Value], place: Place) -> list[Value]:
    """Goes through the derivative of a region, with what scales it."""
    linear = functools.partial(linear_p.impl, **equation.params)
    specs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars]
    closed = jax.make_jaxpr(linear)(*specs)
    scale, *others = operands
    known = Value(scale.array * run.rescaled)
    inside = replace(place.inside(equation), scale=float(known.array))
    if run.look is not None and equation.params["scaled"]:
        found = _factors(equation, known, others)
        run.factors += [(each, inside.scale) for each in found if 0.0 < each < math.inf]
    return run.closed(closed, [known, *others], inside)


def _factors(equation: Any, scale: Value, operands: list[Value]) -> list[float]:
    """Returns what multiplies the gradients that enter a low format; that of the first row."""
    params, row = equation.params, equation.params["row"]
    arrays = [each.array for each in operands]
    if row is not None:
        pairs = zip(arrays, row.dims, strict=True)
        arrays = [array if dim is None else jnp.take(array, 0, dim) for array, dim in pairs]
    jaxpr, held = params["jaxpr"] if row is None else row.jaxpr, params["held"]
    found = factors_of(jaxpr, arrays[:held], arrays[held:], scale.array)
    return [float(each.times) for each in found]


@_handles("cond")
def run_cond(run: Run, equation: Any, operands: list[Value], place: Place) -> list[Value]:
    """Goes through the branch that is taken."""
    index, *given = operands
    branches = equation.params["branches"]
    taken = min(max(int(index.array), 0), len(branches) - 1)
    return run.closed(branches[taken], given, place.inside(equation))


@_handles("while")
def run_while(run: Run, equation: Any, operands: list[Value], place: Place) -> list[Value]:
    """Goes through a loop, turn by turn; where numbers are counted, through its first turns."""
    params, inside = equation.params, place.inside(equation)
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    tested, looped, carry = operands[:first], operands[first:last], operands[last:]
    turn = 0
    while run.closed(params["cond_jaxpr"], [*tested, *carry], inside.at(turn))[0].array:
        if run.look is not None and turn == _ALL_TURNS:
            arrays = [each.array for each in (*tested, *looped, *carry)]
            return list(map(value, run_part(equation, arrays)))
        carry = run.closed(params["body_jaxpr"], [*looped, *carry], inside.at(turn))
        turn += 1
    return carry


@_handles("scan")
def run_scan(run: Run, equation: Any, operands: list[Value], place: Place) -> list[Value]:
    """Goes through a loop over the first axis of arrays, turn by turn.

    Where numbers are counted in a long one, only some turns are gone through, and the others run
    as a whole in between.
    """
    params, inside = equation.params, place.inside(equation)
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    consts, carry, whole = operands[:first], operands[first:last], operands[last:]
    rows = list[list[Value]]()
    stretches = list(_stretches(params["length"], sampled=run.look is not None))
    for turns in reversed(stretches) if params["reverse"] else stretches:
        if len(turns) > 1:
            out = _ahead(equation, turns, consts, carry, whole)
        else:
            slices = [_slice(each, turns.start) for each in whole]
            here = inside.at(turns.start, params["length"])
            out = run.closed(params["jaxpr"], [*consts, *carry, *slices], here)
            out[len(carry) :] = map(_as_row, out[len(carry) :])
        carry, row = out[: len(carry)], out[len(carry) :]
        rows.append(row)
    ordered = rows[::-1] if params["reverse"] else rows
    joined = [_joined(column) for column in zip(*ordered, strict=True)]
    return [*carry, *(joined if rows else _empty(equation, len(carry)))]


def _stretches(length: int, *, sampled: bool) -> Iterator[range]:
    """Yields the turns that are gone through one by one, and stretches of those in between."""
    if not sampled or length <= _ALL_TURNS:
        yield from (range(turn, turn + 1) for turn in range(length))
        return
    looked = [0, 9, *range(99, length, 100)]
    for turn, following in zip(looked, [*looked[1:], length], strict=True):
        yield range(turn, turn + 1)
        if following > turn + 1:
            yield range(turn + 1, following)


def _ahead(
    equation: Any, turns: range, consts: list[Value], carry: list[Value], whole: list[Value]
) -> list[Value]:
    """Runs a stretch of a loop as it was written, in its own formats."""
    parts = [each.array[turns.start : turns.stop] for each in whole]
    arrays = [*(each.array for each in (*consts, *carry)), *parts]
    return list(map(value, run_part(equation, arrays, length=len(turns))))


def _as_row(each: Value) -> Value:
    return replace(each, array=each.array[None], numbers=None)


def _slice(each: Value, turn: int) -> Value:
    name = f"{each.name}[{turn}]" if each.name else ""
    known = {"varies": each.varies, "wide": each.wide, "maker": each.maker}
    return value(each.array[turn], each.origins, name=name, **known)


def _joined(column: tuple[Value, ...]) -> Value:
    origins = frozenset(made for each in column for made in each.origins)
    arrays = [each.array for each in column]
    # In another format, what a turn hands on as it came is not what the next one computes.
    if len({each.dtype for each in arrays}) > 1:
        arrays = [each.astype(jnp.float32) for each in arrays]
    known = {name: any(getattr(each, name) for each in column) for name in ("varies", "wide")}
    return value(jnp.concatenate(arrays), origins, maker=column[-1].maker, **known)


def _empty(equation: Any, first: int) -> list[Value]:
    return [Value(jnp.zeros(var.aval.shape, var.aval.dtype)) for var in equation.outvars[first:]]
