"""The five actions of the rules, carried out on the arguments of one call."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep.core import Rule
from halfstep.errors import RefusedOperationError
from halfstep.torch._dtypes import name_of
from halfstep.torch._engine._ops import Operation

_NARROW = frozenset({torch.float32, torch.float16, torch.bfloat16})
_WIDE = (torch.float32, torch.float64)
_HAS_FLAG = ("cpu", "cuda", "mps", "xpu", "mtia", "maia", "ipu", "xla")


class Cache(Protocol):
    """What makes or remembers a cast."""

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the tensor in another dtype."""


class Casts:
    """Casts for one device and one compute dtype.

    Args:
        device_type: Tensors elsewhere are left alone.
        low: The compute dtype.
        cache: Where the low copies of weights are kept.
    """

    def __init__(self, device_type: str, low: torch.dtype, cache: Cache) -> None:
        self.low = low
        # Only on CPU do the kernels of normalisations take a low input with float32 weights.
        self.mixes = device_type == "cpu"
        self.is_here = on_device(device_type)
        self._cast = cache.cast

    def one(self, value: Any, dtype: torch.dtype) -> Any:
        """Returns a tensor, or each tensor of a list, in `dtype`; other values as they are."""
        if isinstance(value, Tensor):
            given = value.dtype
            if given is dtype or not self.is_here(value):
                return value
            if given in _NARROW:
                return self._cast(value, dtype)
            if given is torch.complex32 and dtype is torch.float32:
                return value.to(torch.complex64)
        elif type(value) in (list, tuple):
            return [self.one(item, dtype) for item in value]
        return value

    def all(self, values: Sequence[Any], dtype: torch.dtype) -> list[Any]:
        """Returns the positional arguments with every tensor in `dtype`."""
        return [self.one(value, dtype) for value in values]

    def named(self, values: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
        """Returns the keyword arguments with every tensor in `dtype`."""
        return {key: self.one(value, dtype) for key, value in values.items()}

    def widest(self, values: Sequence[Any]) -> torch.dtype | None:
        """Returns the widest float dtype among the tensors of this device, or None."""
        widest: torch.dtype | None = None
        for tensor in tensors_of(values):
            if tensor.is_floating_point() and self.is_here(tensor):
                widest = (
                    tensor.dtype if widest is None else torch.promote_types(widest, tensor.dtype)
                )
        return widest


def on_device(device_type: str) -> Callable[[Tensor], bool]:
    """Returns the quickest test of whether a tensor lives on a type of device."""
    if device_type in _HAS_FLAG:
        return operator.attrgetter(f"is_{device_type}")
    return lambda tensor: tensor.device.type == device_type


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors among the arguments, those in lists included."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += tensors_of(value)
    return found


Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Runner = Callable[[Any, Args, Kwargs, Casts], Any]


def _lower(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    return op(*casts.all(args, casts.low), **casts.named(kwargs, casts.low))


def _full(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    return op(*casts.all(args, torch.float32), **casts.named(kwargs, torch.float32))


def _full_by_dtype(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    """Asks for a float32 result, unless the caller asked for a dtype."""
    first, place = args[0], _place_of_dtype(op)
    asked = kwargs.get("dtype") if len(args) <= place else args[place]
    if asked is not None or first.dtype not in _NARROW or not casts.is_here(first):
        return op(*args, **kwargs)
    return op(*args[:place], **{**kwargs, "dtype": torch.float32})


@functools.cache
def _place_of_dtype(op: Any) -> int:
    return [argument.name for argument in op._schema.arguments].index("dtype")


def _widest(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    widest = casts.widest([*args, *kwargs.values()])
    if widest is None:
        return op(*args, **kwargs)
    return op(*casts.all(args, widest), **casts.named(kwargs, widest))


def _like_first(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    """Casts the other tensors to the dtype of the first, which is written to or decides."""
    dtype = args[0].dtype
    if not dtype.is_floating_point:
        return op(*args, **kwargs)
    return op(*casts.all(args, dtype), **casts.named(kwargs, dtype))


def _mixes(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    """Casts weights to the dtype of the input, unless the kernel takes them as they are."""
    given, *weights = (tensor.dtype for tensor in tensors_of(args))
    stay = casts.mixes and given is not torch.float32 and set(weights) == {torch.float32}
    if stay or set(weights) <= {given}:
        return op(*args, **kwargs)
    return _like_first(op, args, kwargs, casts)


def _written(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    """Casts what is written to the dtype of what it is written into; constants have to fit."""
    first, *others = args
    if first.dtype in (torch.float16, torch.bfloat16):
        limits = torch.finfo(first.dtype)
        others = [_within(v, first.dtype, limits) if isinstance(v, Tensor) else v for v in others]
    return _like_first(op, (first, *others), kwargs, casts)


def _keep(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    return op(*args, **kwargs)


def _saturate(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    """Brings constants such as -1e9 to the nearest value that the tensor's dtype can hold."""
    dtype = kwargs.get("dtype") or _dtype_that_decides(args)
    if dtype not in (torch.float16, torch.bfloat16):
        return op(*args, **kwargs)
    limits = torch.finfo(dtype)
    return op(
        *(_within(value, dtype, limits) for value in args),
        **{key: _within(value, dtype, limits) for key, value in kwargs.items()},
    )


def _dtype_that_decides(args: Args) -> torch.dtype | None:
    """Returns the dtype of the first float tensor that has dimensions, as type promotion does."""
    for tensor in tensors_of(args):
        if tensor.is_floating_point() and tensor.dim():
            return tensor.dtype
    return None


def _within(value: Any, dtype: torch.dtype, limits: torch.finfo) -> Any:
    """Returns a finite number, or a tensor of one, within the limits; anything else as it is."""
    if isinstance(value, float | int) and not isinstance(value, bool):
        return value if math.isinf(value) else min(max(value, limits.min), limits.max)
    if isinstance(value, Tensor) and not value.dim() and value.dtype in _WIDE:
        inside = value.clamp(limits.min, limits.max)
        return torch.where(value.isinf(), value, inside).to(dtype)
    return value


def _lower_result(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
    return casts.one(op(*args, **kwargs), casts.low)


_RUNNERS: dict[tuple[str, str], Runner] = {
    ("lower", "inputs"): _lower,
    ("lower", "dtype"): _lower,
    ("lower", "follow"): _lower,
    ("lower", "mixes"): _lower,
    ("lower", "fill"): _lower,
    ("lower", "result"): _lower_result,
    ("full", "inputs"): _full,
    ("full", "dtype"): _full_by_dtype,
    ("full", "follow"): _full,
    ("full", "mixes"): _full,
    ("full", "fill"): _full,
    ("full", "result"): _full,
    ("keep", "follow"): _like_first,
    ("keep", "mixes"): _mixes,
    ("keep", "fill"): _saturate,
    ("widest", "fill"): _saturate,
}


def runner(rule: Rule, operation: Operation) -> Runner:
    """Returns what carries a rule out on an operation.

    Args:
        rule: The row that decides.
        operation: The overload that it decides about.
    """
    if rule.action == "refuse":
        return _refusal(rule.reason, operation)
    if operation.technique == "written" and rule.action != "keep":
        return _written
    standard = _widest if rule.action == "widest" else _keep
    return _RUNNERS.get((rule.action, operation.technique), standard)


def _refusal(reason: str, operation: Operation) -> Runner:
    def refuse(op: Any, args: Args, kwargs: Kwargs, casts: Casts) -> Any:
        given = ", ".join(name_of(tensor.dtype) for tensor in tensors_of(args))
        raise RefusedOperationError(
            f"The rules refuse {operation.base} inside autocast, got ({given}). {reason} "
            "Or run it in autocast(..., enabled=False) on float32 tensors."
        )

    return refuse
