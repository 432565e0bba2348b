"""Every private name of JAX that halfstep uses, checked once at import."""

import contextlib
import inspect
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.interpreters import ad, partial_eval

from halfstep.errors import UnsupportedVersionError

SUPPORTED = "0.9"

_NEEDED = (
    "api_util.debug_info",
    "api_util.fun_sourceinfo",
    "config.trace_context",
    "core.Literal",
    "core.ShapedArray",
    "core.eval_jaxpr",
    "core.jaxprs_in_params",
    "core.typeof",
    "core.unmapped_aval",
    "interpreters.ad.Zero",
    "interpreters.batching.infer",
    "linear_util.wrap_init",
    "source_info_util.current_name_stack",
    "source_info_util.user_context",
    "source_info_util.user_frames",
)


def found(path: str) -> Any:
    """Returns the object of a dotted path below `jax._src`.

    Raises:
        UnsupportedVersionError: This version of JAX has no such object.

    Example:
        >>> found("core.Literal").__name__
        'Literal'
    """
    module, *names = path.rsplit(".", 1)
    try:
        here = import_module(f"jax._src.{module}")
        for name in names:
            here = getattr(here, name)
    except (AttributeError, ImportError):
        raise UnsupportedVersionError(
            f"halfstep.jax needs JAX {SUPPORTED} or later, got {jax.__version__}, which lacks"
            f" jax._src.{path}. Install a supported JAX, or a newer halfstep."
        ) from None
    return here


for _path in _NEEDED:
    found(_path)

Literal = found("core.Literal")
ShapedArray = found("core.ShapedArray")
Zero = found("interpreters.ad.Zero")
typeof = found("core.typeof")
unmapped_aval = found("core.unmapped_aval")
eval_jaxpr = found("core.eval_jaxpr")
_infer = found("interpreters.batching.infer")
sub_jaxprs = found("core.jaxprs_in_params")
_context = found("config.trace_context")
_debug_info = found("api_util.debug_info")
_sourceinfo = found("api_util.fun_sourceinfo")
_wrap = found("linear_util.wrap_init")
_names = found("source_info_util.current_name_stack")
_user_context = found("source_info_util.user_context")
_user_frames = found("source_info_util.user_frames")
_OURS = str(Path(__file__).parents[1])
_STANDARD = sysconfig.get_path("stdlib")

# What JAX itself puts there, around what `checkpoint` computes again.
_NO_SCOPES = ("", "rematted_computation")
# Such as `transpose(jvp(encoder))`, which runs for the module `encoder`.
_TRANSFORMED = re.compile(r"\w+\(([^()]*)\)")


def speaking_of(
    run: Callable[..., Any],
    function: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    places: Sequence[int],
    leaves: Sequence[str] | None = None,
) -> Callable[..., Any]:
    """Returns a function of arrays, in whose place errors of JAX speak of somebody's own.

    Args:
        run: The function of arrays.
        function: The other one.
        args: What that is called with; the object first that a method belongs to.
        kwargs: The same by name.
        places: Which of the leaves of those the arrays are.
        leaves: What the leaves are called, where their own paths do not tell.
    """
    # An object that was made of a function, as by functools.partial, has no line of its own.
    skipped = 1 if " at " not in _sourceinfo(function) and args else 0
    known = _debug_info("autocast", args[0] if skipped else function, args[skipped:], kwargs)
    every = leaves or [""] * len(jax.tree.leaves(args[:skipped])) + list(known.arg_names)
    names = tuple(every[place] for place in places)
    run.__dict__["__fun_debug_info__"] = known._replace(arg_names=names)
    return run


def trace_context() -> Any:
    """Returns all settings of JAX that tracing depends on, hashable."""
    return _context()


def trace(function: Callable[..., Any], like: Any, avals: Sequence[Any]) -> Any:
    """Returns the closed jaxpr of a flat function, under the name of another jaxpr."""
    named = like.debug_info
    debug = named if len(avals) == len(like.invars) else named.with_unknown_names()
    wrapped = _wrap(function, debug_info=debug)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrapped, list(avals))[:3]
    return ClosedJaxpr(jaxpr, consts)


@contextlib.contextmanager
def located(equation: Any) -> Iterator[None]:
    """Binds primitives as if they stood where the equation was written."""
    source = equation.source_info
    names = _names() + source.name_stack
    with _user_context(source.traceback, name_stack=names), equation.ctx.manager:
        yield


def varying_axes(arrays: Sequence[Any]) -> tuple[str, ...]:
    """Returns the mesh axes along which JAX says that arrays differ; 0.10 keeps them elsewhere."""
    avals = [typeof(each) for each in arrays]
    found = [aval.mat.varying if hasattr(aval, "mat") else aval.vma for aval in avals]
    return tuple(sorted(frozenset[str]().union(*found)))


def varying(array: Any, axes: Sequence[str]) -> Any:
    """Returns an array of which JAX says that it differs along mesh axes."""
    missing = tuple(axis for axis in axes if axis not in varying_axes([array]))
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def without_consts(jaxpr: Any) -> Any:
    """Returns an open program that takes what it was traced with as its first arguments."""
    return jaxpr.replace(
        constvars=(),
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )


def mapped(
    function: Callable[..., Any], dims: Any, axis: Any, results: Any = 0, *, added: bool = False
) -> Callable[..., Any]:
    """Returns a function of a row as one of a batch, of which JAX told a batching rule.

    Args:
        function: The function.
        dims: Which axes of the operands are the batch, None for what all rows share.
        axis: What JAX knows of the batch.
        results: The same of the results.
        added: Whether results that rows share are the sum over them.
    """
    return jax.vmap(
        function,
        dims,
        results,
        axis_name=axis.name,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
        sum_match=added,
    )


def asked(found: Sequence[Any], operands: Sequence[Any], held: int) -> list[Any]:
    """Returns the cotangents that a transposition is asked for.

    Args:
        found: Those of what moves.
        operands: What is held, then what moves, which is not there where it is asked for.
        held: How many operands are held.
    """
    pairs = zip(found, operands[held:], strict=True)
    moving = [each if ad.is_undefined_primal(operand) else None for each, operand in pairs]
    return [None] * held + moving


def batched(
    function: Callable[..., Any], dims: Any, axis: Any, arrays: Sequence[Any]
) -> tuple[Any, list[Any]]:
    """Returns the program of a batch, and the axes of its results, None for what rows share."""
    found: list[Any] = []

    def run(*arrays: Any) -> Any:
        out, found[:] = mapped(function, dims, axis, _infer)(*arrays)
        return out

    return jax.make_jaxpr(run)(*arrays), found


def used(jaxpr: Any, *, first_only: bool) -> list[bool]:
    """Returns which operands of a program its results depend on, or its first result alone."""
    wanted = [not (first_only and place) for place in range(len(jaxpr.outvars))]
    return list(partial_eval.dce_jaxpr(jaxpr, wanted)[1])


def manual_axes(equation: Any) -> Any:
    """Returns the mesh axes that a `shard_map` maps over; JAX 0.10 calls them otherwise."""
    params = equation.params
    return params["newly_manual_axes" if "newly_manual_axes" in params else "manual_axes"]


def scope(equation: Any) -> str:
    """Returns the dotted path of the module in which the equation was written.

    Modules of Flax and Haiku are found by the named scopes that they open.
    """
    text, count = str(equation.source_info.name_stack), 1
    while count:
        text, count = _TRANSFORMED.subn(r"\1", text)
    return ".".join(each for each in text.split("/") if each not in _NO_SCOPES)


def is_of_gradient(equation: Any) -> bool:
    """Returns whether an equation is part of a derivative, not of a solver that transposes."""
    return "transpose(jvp(" in str(equation.source_info.name_stack)


def source(equation: Any) -> str:
    """Returns the line from which an equation was traced, as `file:line (function)`."""
    frames = _user_frames(equation.source_info.traceback)
    others = [each for each in frames if not each.file_name.startswith(_OURS)]
    own = [each for each in others if is_own(each.file_name)]
    for frame in own or others:
        return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


def is_own(file: str) -> bool:
    """Returns whether a file is neither halfstep's nor that of another library."""
    library = file.startswith((_OURS, "<frozen")) or "site-packages" in file
    return not library and not file.startswith(_STANDARD)


def is_ours(equation: Any) -> bool:
    """Returns whether an equation was written by halfstep, not for an operation of somebody."""
    frames = list(_user_frames(equation.source_info.traceback))
    return bool(frames) and frames[0].file_name.startswith(_OURS)


def unwrapped(function: Any) -> Any:
    """Returns the function that somebody wrote."""
    inner = inspect.unwrap(getattr(function, "func", function))
    return getattr(inner, "__func__", inner)


def closed_over(
    function: Any, seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Any, Any]]:
    """Yields what a function, or one that it calls, takes from outside.

    Args:
        function: It.
        seen: The functions around it.

    Yields:
        The name and the array, and the function that uses the name.
    """
    owner = unwrapped(function)
    try:
        held = inspect.getclosurevars(owner)
    except TypeError:  # an object that is called
        return
    for name, value in {**held.globals, **held.nonlocals}.items():
        inner = unwrapped(value) if callable(value) else None
        if inspect.isfunction(inner) and id(inner) not in seen:
            if is_own(inner.__code__.co_filename):
                yield from closed_over(inner, seen | {id(owner), id(inner)})
        elif inner is None:
            for path, leaf in jax.tree_util.tree_leaves_with_path(value):
                yield f"{name}{jax.tree_util.keystr(path)}", leaf, owner


def bind(equation: Any, arrays: Sequence[Any], **changes: Any) -> list[Any]:
    """Runs an equation on other operands, with some of its parameters changed."""
    params = equation.primitive.get_bind_params(equation.params | changes)
    with located(equation):
        out = equation.primitive.bind(*arrays, **params)
    return list(out) if equation.primitive.multiple_results else [out]
