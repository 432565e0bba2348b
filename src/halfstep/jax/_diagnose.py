"""Which operation of a function made the first inf or NaN, and what to write instead."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from halfstep.core import Diagnosis, Fault
from halfstep.errors import UsageError
from halfstep.jax._diagnosing import _flow as _flow
from halfstep.jax._diagnosing._programs import Program, forward, run, with_gradient, written_of
from halfstep.jax._diagnosing._remedy import Trial
from halfstep.jax._diagnosing._run import Key, Run
from halfstep.jax._diagnosing._verdict import faults
from halfstep.jax._diagnosing._verdict import told as fault_of
from halfstep.jax._diagnosing._written import Written, has_inf
from halfstep.jax._interpret import FLOAT32


def diagnose(
    function: Callable[..., Any],
    /,
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Diagnosis:
    """Returns which operation made the first inf or NaN, in which scope, and what to write instead.

    The function is traced, and the program goes through its operations one by one, on the values
    that it is given: forward, and if everything is finite there, with its gradient. Where there is
    a fault, it runs in float32 as well, to tell whether low precision is to blame, and with the
    remedies. A module of a fault is the `jax.named_scope` that it stands in, or the function.

    Args:
        function: The function, such as a loss; it may be jitted, or made by `autocast`. Its
            gradient is that of its first result if that is a real number, and else that of the sum
            of all results. One that takes gradients itself is not differentiated again.
        args: What it is called with, in which the numbers that went wrong are.
        argnums: With regard to which arguments gradients are taken, as for `jax.grad`. Default: all
            real numbers. None are with `()`.
        kwargs: The arguments by name.

    Raises:
        UsageError: It is no function, or it has no gradient and `argnums` does not say so, or that
            is not the place of an argument.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(x):
        ...     with jax.named_scope("safe_norm"):
        ...         return jnp.where(x > 0, jnp.sqrt(x), 0).sum()
        >>> fault = diagnose(loss, jnp.array([4.0, 0.0])).first
        >>> fault.module, fault.operation, fault.phase
        ('safe_norm', 'div', 'backward')
        >>> print(fault.remedy)
        safe = jnp.where(h > 0, h, 1)  # h is what goes into sqrt
        jnp.where(h > 0, jnp.sqrt(safe), 0)
    """
    if not callable(function):
        raise UsageError(
            f"diagnose needs a function, got {function!r}. Write diagnose(function, *arguments),"
            " without calling the function."
        )
    numbers = _numbers(argnums, len(args))
    written = functools.cache(lambda: written_of(function, args, kwargs, numbers))
    program = forward(function, args, kwargs)
    if has_inf(program.closed.jaxpr):
        program = replace(program, written=written())
    name = getattr(function, "__name__", type(function).__name__)
    look = functools.partial(_look, written=program, numbers=written, name=name)
    gradient = functools.partial(with_gradient, argnums=numbers)
    first, found = look(program, backward=gradient)
    both = gradient(program) if first.finite else None
    if both is not None:
        found += look(both, known=frozenset(each.key for each in first.made))[1]
    # A number that breaks both passes is one fault.
    told = [replace(each, remedy="", note="") for each in found]
    once = [each for place, each in enumerate(found) if told[place] not in told[:place]]
    return Diagnosis(tuple(once))


def _numbers(argnums: Any, count: int) -> Sequence[int] | None:
    """Returns the places of arguments, counted from the first one."""
    if argnums is None:
        return None
    several = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
    for each in several:
        is_place = isinstance(each, int) and not isinstance(each, bool)
        if not is_place or not -count <= each < count:
            raise UsageError(
                f"diagnose needs argnums from {-count} to {count - 1}, the places of the {count} "
                f"arguments that the function is called with, got {argnums!r}. Write argnums=0, "
                "or () for no gradient."
            )
    return tuple(each % count for each in several)


def _look(
    program: Program,
    *,
    written: Program,
    numbers: Callable[[], tuple[Written, ...]],
    name: str,
    known: frozenset[Key] = frozenset(),
    backward: Callable[[Program], Program | None] = lambda program: None,
) -> tuple[Run, list[Fault]]:
    """Returns how a program ran, and its faults; what is known is not told again."""
    done = run(program, known=known)
    if done.made and not program.written and numbers():
        # A number that somebody wrote may be to blame for what came of it.
        program = replace(program, written=numbers())
        done = run(program, known=known)
    if not done.made:
        return done, []
    in_float32 = run(program, known=known, formats=lambda path: FLOAT32)
    found = faults(done, in_float32)
    of = tuple(found), in_float32, program.cast
    trial = Trial(program, written, known, *of, functools.partial(backward, program))
    return done, [fault_of(each, name, in_float32, trial.remedy(each)) for each in found]
