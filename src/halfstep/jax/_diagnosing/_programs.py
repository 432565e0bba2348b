"""The programs that are looked at: a function forward, and with its gradient."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.extend.core import ClosedJaxpr

from halfstep.errors import UsageError
from halfstep.jax import _modules, _tracing
from halfstep.jax._arguments import ROOTS, is_real, traced
from halfstep.jax._autocast import is_cast, parts
from halfstep.jax._diagnosing._assigned import assigned
from halfstep.jax._diagnosing._made import Made, Value, value
from halfstep.jax._diagnosing._numbers import is_inexact, largest, numbers
from halfstep.jax._diagnosing._place import Place
from halfstep.jax._diagnosing._run import Run
from halfstep.jax._diagnosing._written import Written, names_of, written_in
from halfstep.jax._private import eval_jaxpr, is_of_gradient, sub_jaxprs


@dataclass(frozen=True)
class Program:
    """What is run.

    Args:
        closed: The program.
        operands: What it is called with.
        names: What each operand is called, such as `args[0]['w']`.
        cast: Whether `autocast` made the function.
        way_back: Whether it holds the gradient as well.
        moved: The names of what that is with regard to; the gradients are the last results.
        constants: What each constant is called.
        written: The numbers that were written in it and that it cannot hold.
    """

    closed: Any
    operands: tuple[Any, ...]
    names: tuple[str, ...]
    cast: bool
    way_back: bool = False
    moved: tuple[str, ...] = ()
    constants: dict[int, str] = field(default_factory=dict)
    written: tuple[Written, ...] = ()

    @property
    def goes_back(self) -> bool:
        """Whether it takes gradients by itself."""
        return _goes_back(self.closed.jaxpr)


def run(program: Program, **options: Any) -> Run:
    """Runs a program; the options are those of a run."""
    done = Run(way_back=program.way_back, written=program.written, **options)
    with jax.debug_nans(False), jax.debug_infs(False), np.errstate(all="ignore"):
        pairs = zip(program.operands, program.names, strict=True)
        operands = [replace(_operand(done, *pair), varies=True) for pair in pairs]
        consts = [
            _constant(done, array, program.constants.get(id(array), ""))
            for array in program.closed.consts
        ]
        done.results = done.program(program.closed.jaxpr, consts, operands, Place())
    return done


def is_loss_scale(array: Any, name: str, known: float = 0.0) -> bool:
    """Returns whether something is what the loss is multiplied by.

    Args:
        array: It.
        name: What it is called.
        known: The loss scale, if that is known and not 1; a function may close over it.
    """
    if np.shape(array) != ():
        return False
    named = name.endswith((".loss_scale", "['loss_scale']"))
    return named or (known not in (0.0, 1.0) and is_inexact(array.dtype) and array == known)


def _constant(done: Run, array: Any, name: str) -> Value:
    known = done.constant(array, Place(), name, anywhere=True)
    if known.written is not None:
        return known
    # Integers that somebody calls it with stand in the program as well.
    given = name.startswith(ROOTS)
    value = _operand(done, array, name or "constant", "input" if given else "constant")
    return replace(value, name=name, constant=not given)


def _operand(done: Run, array: Any, name: str, kind: str = "input") -> Value:
    if done.loss_rescaled != 1.0 and is_loss_scale(array, name, done.loss_scale):
        array = array * done.loss_rescaled
    held = numbers(array)
    if held is None or held.finite:
        return Value(array, name=name)
    # What a mask of -inf in the data makes of a gradient is not the fault of the data.
    meant = (name, "data", "") in done.known and held.kind == "inf"
    made = Made(name, "data", False, "", held, largest([held]), meant=meant, held_by=kind)
    done.made.append(made)
    return value(array, frozenset((made,)))


def forward(function: Callable[..., Any], args: Any, kwargs: Any) -> Program:
    """Returns a function as it was traced."""
    args, kwargs = jax.tree.map(_as_array, (args, kwargs))
    called, owner = parts(function)
    with _tracing.inside():
        program = traced(called, ((*owner, *args), kwargs), is_real)
    names = _names(((*owner, *args), kwargs), len(owner))
    closed = program.closed
    pairs = zip(closed.consts, names_of(called, closed.consts), strict=True)
    constants = {id(each): name for each, name in pairs if name}
    leaves = _modules.leaves_with_path(((*owner, *args), kwargs))
    constants |= {id(leaf): _name(path, len(owner)) for path, leaf in leaves if not is_real(leaf)}
    operands = tuple(program.operands)
    return Program(closed, operands, names, is_cast(function), constants=constants)


def written_of(
    function: Callable[..., Any], args: Any, kwargs: Any, argnums: Sequence[int] | None
) -> tuple[Written, ...]:
    """Returns the numbers that were written in a function and that its formats cannot hold."""

    def trace() -> Any:
        program = forward(function, args, kwargs)
        with contextlib.suppress(UsageError):
            return (with_gradient(program, argnums) or program).closed
        return program.closed

    return *written_in(trace), *assigned(parts(function)[0])


def _as_array(leaf: Any) -> Any:
    """Returns an array of NumPy as JAX computes with it."""
    is_number = isinstance(leaf, np.ndarray | np.generic) and is_inexact(leaf.dtype)
    return jnp.asarray(leaf) if is_number else leaf


def _names(arguments: Any, before: int) -> tuple[str, ...]:
    leaves = _modules.leaves_with_path(arguments)
    return tuple(_name(path, before) for path, leaf in leaves if is_real(leaf))


def _name(path: Sequence[Any], before: int) -> str:
    root, first, *rest = path
    if root.idx == 0 and first.idx < before:
        return f"function{jax.tree_util.keystr(tuple(rest))}"
    if root.idx == 0:
        first = jax.tree_util.SequenceKey(first.idx - before)
    return ROOTS[root.idx] + jax.tree_util.keystr((first, *rest))


def with_gradient(program: Program, argnums: Sequence[int] | None) -> Program | None:
    """Returns a program with its gradient, None where there is none to take.

    Args:
        program: The program.
        argnums: With regard to which positional arguments, None for everything.
    """
    moved = [index for index, name in enumerate(program.names) if _is_asked(name, argnums)]
    floats = [
        index for index, aval in enumerate(program.closed.out_avals) if is_inexact(aval.dtype)
    ]
    if not moved or not floats or program.goes_back:
        return None
    outputs = floats[:1] if program.closed.out_avals[0].shape == () and floats[0] == 0 else floats
    closed = _differentiated(program, moved, outputs)
    names = tuple(program.names[index] for index in moved)
    return replace(program, closed=closed, way_back=True, moved=names)


def _differentiated(program: Program, moved: list[int], outputs: list[int]) -> ClosedJaxpr:
    def run_all(*operands: Any) -> Any:
        def of(*given: Any) -> list[Any]:
            together = dict(enumerate(operands)) | dict(zip(moved, given, strict=True))
            closed = program.closed
            out = eval_jaxpr(closed.jaxpr, closed.consts, *together.values())
            return [out[index] for index in outputs]

        out, pull = jax.vjp(of, *(operands[index] for index in moved))
        return out, pull(list(map(jnp.ones_like, out)))

    try:
        return jax.make_jaxpr(run_all)(*program.operands)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise UsageError(
            f"diagnose needs a function that has a gradient, got one of which JAX says: {error}."
            " Write diagnose(function, ..., argnums=()) to look at what it computes only."
        ) from error


def _is_asked(name: str, argnums: Sequence[int] | None) -> bool:
    return argnums is None or any(name.startswith(f"args[{number}]") for number in argnums)


def _goes_back(jaxpr: Any) -> bool:
    return any(
        is_of_gradient(equation) or any(map(_goes_back, sub_jaxprs(equation.params)))
        for equation in jaxpr.eqns
    )
