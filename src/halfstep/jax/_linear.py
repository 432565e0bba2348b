"""The derivative of a region, as an operation of its own.

It is linear, so it can be computed of numbers that were multiplied by a power of two, and the
result divided by it again. The derivative itself runs as it is, its transpose, which gradients go
through, is scaled, and so is everything that comes of differentiating that again.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp
from jax.extend.core.primitives import stop_gradient_p
from jax.interpreters import ad, batching, mlir

from halfstep.errors import UsageError
from halfstep.jax._linearity import is_linear
from halfstep.jax._primitives import linear_p
from halfstep.jax._private import Zero, asked, batched, eval_jaxpr, mapped, without_consts
from halfstep.jax._scaled import run_scaled


@dataclass(frozen=True)
class Row:
    """What is done for each row of a batch.

    Args:
        jaxpr: The program for a row.
        dims: Which axes of the operands are the batch, None for what all rows share.
        axis: What JAX knows of the batch.
    """

    jaxpr: Any
    dims: tuple[int | None, ...]
    axis: Any

    def mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of a row as one of the batch."""
        return mapped(function, self.dims, self.axis)


def linear_map(
    scale: Any,
    closed: Any,
    held: Sequence[Any],
    moving: Sequence[Any],
    *,
    scaled: bool,
    row: Row | None = None,
) -> list[Any]:
    """Runs a linear program as one operation.

    Args:
        scale: What the sum of the magnitudes of what enters is brought below.
        closed: The program, which takes what is held, then what it is linear in.
        held: The values that it depends on otherwise.
        moving: What it is linear in.
        scaled: Whether what enters is scaled.
        row: What the program does for each row, where each is to be scaled by itself.
    """
    operands = (scale, *closed.consts, *held, *moving)
    jaxpr = without_consts(closed.jaxpr)
    count = len(closed.consts) + len(held)
    out: list[Any] = linear_p.bind(*operands, jaxpr=jaxpr, held=count, scaled=scaled, row=row)
    return out


def _run(
    scale: Any, *operands: Any, jaxpr: Any, held: int, scaled: bool, row: Row | None
) -> list[Any]:
    if not scaled:
        return list(eval_jaxpr(jaxpr, (), *operands))
    program = jaxpr if row is None else row.jaxpr

    def run(*arrays: Any) -> list[Any]:
        return run_scaled(program, arrays[:held], arrays[held:], scale)

    return run(*operands) if row is None else list(row.mapped(run)(*operands))


linear_p.def_impl(_run)
linear_p.def_effectful_abstract_eval(
    lambda *_, jaxpr, **__: ([var.aval for var in jaxpr.outvars], jaxpr.effects)
)
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=True))


def _transpose(
    cotangents: Sequence[Any], scale: Any, *operands: Any, jaxpr: Any, held: int, **_: Any
) -> list[Any]:
    live = [place for place, each in enumerate(cotangents) if not isinstance(each, Zero)]
    given = [
        each.aval if ad.is_undefined_primal(each) else jax.typeof(each) for each in operands[held:]
    ]

    def run(*arrays: Any) -> tuple[Any, ...]:
        def forward(*moving: Any) -> list[Any]:
            results = eval_jaxpr(jaxpr, (), *arrays[:held], *moving)
            return [results[place] for place in live]

        return jax.linear_transpose(forward, *given)(list(arrays[held:]))

    entering = [cotangents[place] for place in live]
    closed = jax.make_jaxpr(run)(*operands[:held], *entering)
    out = linear_map(scale, closed, operands[:held], entering, scaled=True)
    return asked(out, (scale, *operands), 1 + held)


ad.primitive_transposes[linear_p] = _transpose


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, held: int, scaled: bool, **others: Any
) -> tuple[list[Any], list[Any]]:
    scale, *operands = primals
    params = {"held": held, "scaled": scaled, **others}
    moves = [not isinstance(each, Zero) for each in tangents[1:]]
    if not any(moves[:held]) and _is_linear(others["jaxpr"], held, scaled=scaled):
        moving = map(ad.instantiate_zeros, tangents[1 + held :])
        both = ([*operands[held:]], [*moving])
        out, moved = (linear_p.bind(scale, *operands[:held], *each, **params) for each in both)
        return out, moved
    ways = [each for each, does in zip(tangents[1:], moves, strict=True) if does]
    program = functools.partial(_run, scale, **params)
    # What is held by now has that scale, and is multiplied with what enters.
    scale = jnp.ones_like(scale) if scaled else scale
    return derivative(scale, program, operands, moves, ways, scaled=scaled)


def _is_linear(jaxpr: Any, held: int, *, scaled: bool) -> bool:
    # What is not scaled was made by going forward, where JAX takes care of it.
    return not scaled or is_linear(jaxpr, [place >= held for place in range(len(jaxpr.invars))])


ad.primitive_jvps[linear_p] = _jvp


def derivative(
    scale: Any,
    program: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    moves: Sequence[bool],
    ways: Sequence[Any],
    *,
    scaled: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Returns what a program gives, and how its real results move.

    Args:
        scale: What the sum of the magnitudes of gradients is brought below.
        program: The program.
        operands: What it is called with.
        moves: Which of them move.
        ways: The tangents of those.
        scaled: Whether the tangents are scaled as well.
    """

    def at(*moving: Any) -> list[Any]:
        moved = iter(moving)
        pairs = zip(operands, moves, strict=True)
        return list(program(*(next(moved) if does else each for each, does in pairs)))

    start = [each for each, does in zip(operands, moves, strict=True) if does]
    out, tangents = jax.linearize(at, *start)
    closed = jax.make_jaxpr(lambda *given: list(filter(_is_real, tangents(*given))))(*ways)
    _refuse_references(closed.jaxpr)
    return out, linear_map(scale, closed, (), ways, scaled=scaled)


def _refuse_references(jaxpr: Any) -> None:
    if any(hasattr(var.aval, "inner_aval") for each in jaxpr.eqns for var in each.outvars):
        raise UsageError(
            "Gradients are scaled by autocast only where they need no mutable array, got a function"
            " that makes one with jax.new_ref. Write policy='mixed_bfloat16', which scales"
            " nothing, or carry the values through the loop."
        )


def _is_real(tangent: Any) -> bool:
    return bool(tangent.dtype != jax.dtypes.float0)


def _batch(
    axis: Any,
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: Any,
    held: int,
    scaled: bool,
    **_: Any,
) -> tuple[list[Any], list[Any]]:
    scale, *arrays = operands
    scale = scale if dims[0] is None else jnp.min(scale)
    program, row = functools.partial(eval_jaxpr, jaxpr, ()), Row(jaxpr, tuple(dims[1:]), axis)
    if scaled:
        closed = jax.make_jaxpr(row.mapped(program))(*arrays)
        out = linear_map(scale, closed, arrays[:held], arrays[held:], scaled=True, row=row)
        return out, [0] * len(out)
    # It is scaled when it is transposed, and adds up rows then.
    closed, found = batched(program, row.dims, axis, arrays)
    return linear_map(scale, closed, arrays[:held], arrays[held:], scaled=False), found


batching.fancy_primitive_batchers[linear_p] = _batch
# A branch that JAX batches stops gradients of the rows that do not take it.
ad.primitive_transposes.setdefault(stop_gradient_p, lambda cotangents, _: [None])
