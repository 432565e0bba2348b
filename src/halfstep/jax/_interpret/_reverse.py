"""How a function moves of which only the way back is known, as an operation.

JAX has one as well, which can be transposed, but not batched before that.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from halfstep.errors import UsageError
from halfstep.jax._primitives import reverse_p
from halfstep.jax._private import asked, eval_jaxpr, mapped, unmapped_aval, without_consts


def run_reverse(
    backward: Callable[..., Sequence[Any]],
    held: Sequence[Any],
    moving: Sequence[Any],
    avals: Sequence[Any],
) -> list[Any]:
    """Returns how results move.

    Args:
        backward: Takes what is held, then a cotangent for each result, and returns one for each
            of what moves.
        held: The values that it depends on otherwise.
        moving: What moves.
        avals: The types of the results.
    """
    closed = jax.make_jaxpr(backward)(*held, *(each.to_ct_aval() for each in avals))
    operands = (*closed.consts, *held, *moving)
    out: list[Any] = reverse_p.bind(
        *operands,
        jaxpr=without_consts(closed.jaxpr),
        held=len(operands) - len(moving),
        avals=tuple(avals),
    )
    return out


def _refuse(*_: Any, **__: Any) -> list[Any]:
    raise UsageError(
        "Forward mode needs a jvp of every function, got a custom_vjp, which has a backward only."
        " Write jax.vjp or jax.grad, or define that function with jax.custom_jvp."
    )


reverse_p.def_impl(_refuse)
reverse_p.def_abstract_eval(lambda *_, avals, **__: [each.to_tangent_aval() for each in avals])
mlir.register_lowering(reverse_p, mlir.lower_fun(_refuse, multiple_results=True))


def _transpose(
    cotangents: Sequence[Any], *operands: Any, jaxpr: Any, held: int, **_: Any
) -> list[Any]:
    entering = map(ad.instantiate_zeros, cotangents)
    out = eval_jaxpr(jaxpr, (), *operands[:held], *entering)
    return asked(out, operands, held)


ad.primitive_transposes[reverse_p] = _transpose


def _batch(
    axis: Any,
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    jaxpr: Any,
    held: int,
    avals: Sequence[Any],
) -> tuple[list[Any], list[int | None]]:
    dim = None if all(each is None for each in dims) else 0
    types = [unmapped_aval(axis.size, dim, each, axis.explicit_mesh_axis) for each in avals]
    entering = [dim] * len(avals)
    row = partial(eval_jaxpr, jaxpr, ())
    # What rows share moves all of them.
    rows = mapped(row, (*dims[:held], *entering), axis, list(dims[held:]), added=True)
    return run_reverse(rows, operands[:held], operands[held:], types), entering


batching.fancy_primitive_batchers[reverse_p] = _batch
