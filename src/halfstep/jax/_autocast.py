"""Makes a function run in mixed precision, each operation in the dtype that the rules say."""

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import jax

from halfstep.core import Auto, Policy, Rules, overriding_policy
from halfstep.errors import PolicyError, UsageError
from halfstep.jax import _keywords, _leaks, _tracing
from halfstep.jax._arguments import Traced, is_real, traced
from halfstep.jax._auto import asked_policy, settled
from halfstep.jax._interpret import (
    FLOAT32,
    Context,
    Value,
    context_of,
    interpret,
    parameters,
    wanted_dtypes,
)
from halfstep.jax._private import eval_jaxpr, sub_jaxprs
from halfstep.jax._region import bounded, initial_scale
from halfstep.jax._unmatched import warn_of_unmatched
from halfstep.jax._unscaled import warn_of_gradients

_Function = TypeVar("_Function", bound=Callable[..., Any])
_MADE = "__halfstep_autocast__"
_COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
_Jitted = type(jax.jit(lambda: None))
_NO_CONTEXT = (
    "In JAX it transforms a function and is no context: write autocast(function, policy)(...) in"
    " place of a with statement."
)


@overload
def autocast(
    function: _Function, /, policy: Policy | str = ..., *, scale: Any = ...
) -> _Function: ...


@overload
def autocast(
    function: None = None, /, policy: Policy | str = ..., *, scale: Any = ...
) -> Callable[[_Function], _Function]: ...


def autocast(
    function: Any = None,
    /,
    policy: Policy | str = "mixed_bfloat16",
    *more: Any,
    scale: Any = None,
    **others: Any,
) -> Any:
    """Returns a function whose operations run in the dtypes that a policy's rules say.

    It takes and returns what the function does, and composes in any order with `jax.jit`, `grad`,
    `vmap`, `jvp` and `checkpoint`. What runs inside of `jit`, loops, branches, `checkpoint`,
    `shard_map` and functions with derivatives of their own follows the rules as well; kernels of
    Pallas and operations that halfstep does not know run as they are written. Loops carry the
    dtypes that they were written for. With `compute_dtype=float32` nothing changes at all.

    Where the policy scales, the function is a region: gradients are multiplied by a power of two
    where they enter a low format and divided by it, in float32, where they leave the function, so
    what `jax.grad` returns is true-valued. The power of two is chosen by what enters. The backward
    of a `custom_vjp` inside that is not linear, such as a clip, is handed true cotangents and runs
    as it is written. Forward mode is not scaled, nor are the terms of a second derivative that lead
    back through what the first one kept for its backward.

    Args:
        function: The function. Default: `autocast` is used as a decorator with arguments.
        policy: The policy, or its text form. Its `param_dtype` is of no account here: parameters
            are arguments, in whatever dtype they have. `auto` is what the device is fast in,
            measured when the function is first called.
        scale: What the sum of the magnitudes of gradients that enter a low format is brought
            below: a number, an array, or something that has one as `loss_scale` or `scale`.
            Default: that of the policy if it is static, and 1024 if it is dynamic, because nobody
            adapts it.
        more: Nothing; what is given here is refused with what to write instead.
        others: Likewise.

    Returns:
        The function in mixed precision.

    Raises:
        PolicyError: The policy cannot be read, or its rules say nothing about JAX.
        ScaleError: The scale is not a number above 0.
        RefusedOperationError: The rules refuse an operation; raised when it is called.
        RuleError: A rule names an operation that is not known; raised when it is called.
        UsageError: It is no function that runs in one go, there is an argument that there is none
            of, it is a layer that makes parameters while it is called, or a backward that is not
            linear stands where it cannot be handed true cotangents.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> weights, inputs = jnp.ones((4, 2)), jnp.ones((3, 4))
        >>> @autocast
        ... def loss(weights, inputs):
        ...     product = inputs @ weights
        ...     return jnp.mean(product**2)
        >>> loss(weights, inputs).dtype, jax.grad(loss)(weights, inputs).dtype
        (dtype('float32'), dtype('float32'))
        >>> "bf16[3,2] = dot_general" in str(jax.make_jaxpr(loss)(weights, inputs))
        True
    """
    _keywords.check(policy, more, others)
    asked = asked_policy(policy)
    # A scale is checked for a policy that has one.
    initial_scale(_checked(asked) if isinstance(asked, Policy) else Policy(), scale)
    if function is None:
        return _Decorator(autocast, policy=asked, scale=scale)
    _check_function(function)
    called, owner = parts(function)

    @functools.wraps(function, updated=["__dict__"] if inspect.isroutine(function) else [])
    def run(*args: Any, **kwargs: Any) -> Any:
        chosen = _chosen(asked)
        nested = _tracing.is_inside()
        if chosen.compute_dtype == "float32" and not nested:
            return function(*args, **kwargs)
        with _tracing.inside(), _leaks.refused():
            program = traced(called, ((*owner, *args), kwargs), is_real)
        return program.finish(_run(program, chosen, scale, nested=nested))

    run.__dict__[_MADE] = (asked, run)
    return run


class _Decorator(functools.partial[Any]):
    """Waits for a function, and says so where it is taken for a context, as others have one."""

    def __enter__(self) -> None:
        raise UsageError(f"autocast needs a function, got a with statement. {_NO_CONTEXT}")

    def __exit__(self, *_: object) -> None:
        """Is never reached."""


def is_cast(function: Any) -> bool:
    """Returns whether `autocast` made a function, which may be wrapped by others such as `jit`."""
    while not hasattr(function, _MADE):
        inner = function.func if isinstance(function, functools.partial) else None
        function = getattr(function, "__wrapped__", inner)
        if function is None:
            return False
    return True


def uncast(function: Any) -> tuple[Any, Policy | Auto | None]:
    """Returns a function without `autocast`, compiled or not, and the policy that it had."""
    if hasattr(type(function).__call__, _MADE):
        function = function.__call__
    inner: Any = function.__dict__["__wrapped__"] if isinstance(function, _Jitted) else function
    policy, made = getattr(inner, _MADE, (None, None))
    # What wraps it, as jax.grad does, has its attributes, too.
    if made is not getattr(inner, "__func__", inner):
        return function, None
    plain = inner.__wrapped__
    return (types.MethodType(plain, inner.__self__) if inspect.ismethod(inner) else plain), policy


def parts(function: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns what is called, and the object it belongs to, which is an argument as well."""
    if inspect.ismethod(function):
        return function.__func__, (function.__self__,)
    if inspect.isroutine(function):
        return function, ()
    return type(function).__call__, (function,)


def _chosen(asked: Policy | Auto) -> Policy:
    """Returns the policy in force; who asks for float32 gets it in any case."""
    if isinstance(asked, Policy) and asked.compute_dtype == "float32":
        return asked
    return _checked(settled(overriding_policy() or asked))


def _checked(policy: Policy) -> Policy:
    if policy.compute_dtype not in _COMPUTE_DTYPES:
        raise PolicyError(
            f"autocast needs compute_dtype to be one of {', '.join(_COMPUTE_DTYPES)}, got"
            f" {policy.compute_dtype!r}. What is in float64 already is left alone."
        )
    return policy


def _check_function(function: Any) -> None:
    if _keywords.is_device(function):
        raise UsageError(
            f"autocast needs a function, got the device {function!r}. It runs where its arrays are:"
            f" write @autocast(policy='mixed_bfloat16'). {_NO_CONTEXT}"
        )
    if isinstance(function, str | Policy):
        raise UsageError(
            f"autocast needs a function, got the policy {function!r}. Write"
            f" @autocast(policy={function!r}), or autocast(function, {function!r}). {_NO_CONTEXT}"
        )
    suspended = (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )
    if not callable(function) or isinstance(function, type) or any(f(function) for f in suspended):
        raise UsageError(
            f"autocast needs a function that runs in one go, got {function!r}."
            " Write autocast(function, policy), or put @autocast above the function."
        )


def _run(program: Traced, policy: Policy, scale: Any, *, nested: bool) -> Sequence[Any]:
    operands = [*program.closed.consts, *program.operands]
    around = initial_scale(policy, scale)
    warn_of_unmatched(program.closed.jaxpr, policy.rules)
    if around is not None and policy.compute_dtype == "float16":
        warn_of_gradients(program.closed.jaxpr, policy)
    # What is around may scale, now or when what was compiled here is used again.
    scaled, note = nested or around is not None, _tracing.note()
    context = replace(context_of(policy), scaled=scaled, note=note, twice=note is not None)
    run = lowered(program.closed, policy, context)
    region = run if around is None else functools.partial(_bounded, run, around)
    if nested:
        region = jax.jit(_tracing.named(region))
    results: Sequence[Any] = region(*operands)
    return results


def _bounded(run: Callable[..., Sequence[Any]], scale: Any, *arrays: Any) -> Sequence[Any]:
    return bounded(run, scale, arrays)


def lowered(closed: Any, policy: Policy, context: Context) -> Callable[..., Sequence[Any]]:
    """Returns what runs a program by the rules, on its constants and its operands."""
    count, jaxpr = len(closed.consts), closed.jaxpr
    dtypes = _output_dtypes(closed, policy)
    is_plain = policy.compute_dtype == "float32"
    if is_plain and context.scaled and _goes_back_by_itself(jaxpr):
        is_plain, context = False, replace(context, rules=Rules.named("none"))

    # It outlives the trace, so it must not hold a value.
    def run(*arrays: Any) -> list[Any]:
        if is_plain:
            return list(eval_jaxpr(jaxpr, arrays[:count], *arrays[count:]))
        values = parameters(arrays)
        out = interpret(jaxpr, values[:count], values[count:], context)
        return list(map(_handed_back, out, dtypes))

    return run


def _goes_back_by_itself(jaxpr: Any) -> bool:
    """Returns whether a program holds a function with a backward of its own."""
    return any(
        equation.primitive.name == "custom_vjp_call"
        or any(map(_goes_back_by_itself, sub_jaxprs(equation.params)))
        for equation in jaxpr.eqns
    )


def _output_dtypes(closed: Any, policy: Policy) -> list[Any]:
    """Returns the dtypes of results: those they were written in, but for float32."""
    output = jax.numpy.dtype(policy.output_dtype)
    return [output if dtype == FLOAT32 else dtype for dtype in wanted_dtypes(closed.out_avals)]


def _handed_back(value: Value, dtype: Any) -> Any:
    return value.array if dtype is None else value.in_(dtype)
