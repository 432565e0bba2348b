"""What the operations of PyTorch do with their arguments, as far as it is not in their names."""

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor

# They hand out memory that nobody has written to yet.
UNWRITTEN = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
)
# They write all of their first argument, whatever was there.
_OVERWRITE = frozenset(
    f"aten::{name}_"
    for name in ("copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential")
)
# What they hand on besides their first result is for their own backward.
_AUXILIARY = (
    "nll_loss",
    "scaled_dot_product",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "rms_norm",
    "max_pool",
    "dropout",
    "ctc_loss",
    "attention_forward",
)


@functools.cache
def is_plain(overload: Any) -> bool:
    """Returns whether an operation makes no number of its own, such as a view."""
    name = overload._schema.name
    return name in UNWRITTEN or (overload.is_view and not overload._schema.is_mutable)


@functools.cache
def _written(overload: Any) -> tuple[tuple[int, str], ...]:
    """Returns the places and names of the arguments that an operation writes to."""
    return tuple(
        (place, each.name)
        for place, each in enumerate(overload._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write
    )


def written(overload: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that an operation writes to in place."""
    if not overload._schema.is_mutable:
        return []
    values = [
        args[place] if place < len(args) else kwargs.get(name) for place, name in _written(overload)
    ]
    return list(tensors(values))


def read(overload: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the tensors that an operation reads."""
    first = 1 if overload._schema.name in _OVERWRITE else 0
    out = _out(overload)
    named = [value for name, value in kwargs.items() if name not in out]
    return list(tensors((args[first:], named)))


@functools.cache
def _out(overload: Any) -> frozenset[str]:
    """Returns the names of the arguments that only receive a result."""
    return frozenset(each.name for each in overload._schema.arguments if each.is_out)


def results(overload: Any, result: Any, changed: list[Tensor]) -> list[Tensor]:
    """Returns the tensors of a result that a model goes on with."""
    found = [*tensors(result), *([] if result is not None else changed)]
    return found[:1] if _is_auxiliary(overload) else found


@functools.cache
def _is_auxiliary(overload: Any) -> bool:
    name = overload._schema.name
    return any(part in name for part in _AUXILIARY) and "backward" not in name


def tensors(values: Any) -> Iterator[Tensor]:
    """Yields the tensors among arguments, those in lists included."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for each in values:
            yield from tensors(each)
    elif isinstance(values, dict):
        yield from tensors(list(values.values()))


def numbers(values: Any) -> tuple[float, ...]:
    """Returns the numbers among arguments.

    Example:
        >>> numbers([-1e9, 2, True, None])
        (-1000000000.0, 2.0)
    """
    return tuple(float(each) for each in values if type(each) in (float, int))
