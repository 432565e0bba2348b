"""A backward that is handed true cotangents, as an operation that whoever scales them can see."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from halfstep.jax._primitives import true_p
from halfstep.jax._private import Zero, batched, eval_jaxpr, sub_jaxprs, without_consts


def run_true(
    function: Callable[..., Sequence[Any]], held: Sequence[Any], cotangents: Sequence[Any]
) -> list[Any]:
    """Runs a function of cotangents that nothing may have scaled.

    Args:
        function: What takes arrays that are held, then cotangents.
        held: Those arrays.
        cotangents: The cotangents.
    """
    return _called(jax.make_jaxpr(function)(*held, *cotangents), held, cotangents)


def _called(closed: Any, held: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    operands = (*closed.consts, *held, *cotangents)
    count = len(operands) - len(cotangents)
    out: list[Any] = true_p.bind(*operands, jaxpr=without_consts(closed.jaxpr), held=count)
    return out


def holds_true(equation: Any) -> bool:
    """Returns whether such an operation is an equation, or stands in a program that it holds."""
    return equation.primitive is true_p or any(
        holds_true(inner) for jaxpr in sub_jaxprs(equation.params) for inner in jaxpr.eqns
    )


def _run(*operands: Any, jaxpr: Any, **_: Any) -> list[Any]:
    return list(eval_jaxpr(jaxpr, (), *operands))


true_p.def_impl(_run)
true_p.def_effectful_abstract_eval(
    lambda *_, jaxpr, **__: ([var.aval for var in jaxpr.outvars], jaxpr.effects)
)
mlir.register_lowering(true_p, mlir.lower_fun(_run, multiple_results=True))


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[list[Any], list[Any]]:
    """Returns what moves as for any other program; its derivative may be scaled."""
    moves = [not isinstance(each, Zero) for each in tangents]

    def at(*moving: Any) -> list[Any]:
        moved = iter(moving)
        pairs = zip(primals, moves, strict=True)
        return _run(*(next(moved) if does else each for each, does in pairs), **params)

    start, ways = (
        [each for each, does in zip(both, moves, strict=True) if does]
        for both in (primals, tangents)
    )
    out, found = jax.jvp(at, start, ways)
    return out, found


ad.primitive_jvps[true_p] = _jvp


def _batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, held: int, **params: Any
) -> tuple[list[Any], list[Any]]:
    closed, found = batched(partial(_run, **params), tuple(dims), axis, operands)
    return _called(closed, operands[:held], operands[held:]), found


batching.fancy_primitive_batchers[true_p] = _batch
