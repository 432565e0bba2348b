"""Goes through a program, equation by equation."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from jax import numpy as jnp

from halfstep.jax._interpret._context import Context
from halfstep.jax._interpret._demand import demanded
from halfstep.jax._interpret._operation import run_operation
from halfstep.jax._interpret._values import UNKNOWN, Value, constant
from halfstep.jax._ops import plain_name
from halfstep.jax._private import Literal

Handler: TypeAlias = Callable[[Any, Sequence[Value], Context], list[Value]]

# Who runs the equations that hold other programs, by the name of the primitive.
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Makes a function run the equations of these primitives."""

    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def interpret(
    jaxpr: Any, consts: Sequence[Value], operands: Sequence[Value], context: Context
) -> list[Value]:
    """Runs a program in the dtypes that the rules say.

    Args:
        jaxpr: The program.
        consts: What it was traced with.
        operands: What it is called with, in whatever dtypes.
        context: The rules.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Any) -> Value:
        return _literal(atom) if isinstance(atom, Literal) else values[atom]

    wide = demanded(jaxpr, context)
    for equation, done in zip(jaxpr.eqns, _last_uses(jaxpr), strict=True):
        handler = _HANDLERS.get(plain_name(equation.primitive.name))
        operands = [read(atom) for atom in equation.invars]
        if handler is None:
            results = run_operation(equation, operands, context, wide)
        else:
            results = handler(equation, operands, context)
        values.update(zip(equation.outvars, results, strict=True))
        for variable in done:
            del values[variable]
    return [read(atom) for atom in jaxpr.outvars]


def _last_uses(jaxpr: Any) -> list[list[Any]]:
    """Returns what no later equation reads, for each one, so that memory can be freed."""
    seen = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    found = []
    for equation in reversed(jaxpr.eqns):
        read = {atom for atom in equation.invars if not isinstance(atom, Literal)}
        # What is never read is dropped at once.
        found.append([*(read - seen), *(set(equation.outvars) - seen)])
        seen |= read
    return found[::-1]


def _literal(atom: Any) -> Value:
    dtype = getattr(atom.aval, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.number) or jnp.iscomplexobj(atom.val):
        return Value(atom.val, UNKNOWN)
    return Value(atom.val, constant(float(np.asarray(atom.val))))
