"""Autograd functions of your own inside a region."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from halfstep.errors import UsageError
from halfstep.torch._devices import check_device, default_device
from halfstep.torch._engine._actions import on_device
from halfstep.torch._engine._snapshot import Restored, Snapshot, snapshot

_Function = Callable[..., Any]
_KEY = "_halfstep_state"


@overload
def custom_fwd(
    fwd: _Function, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> _Function: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[[_Function], _Function]: ...
def custom_fwd(
    fwd: _Function | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | None = None,
) -> _Function | Callable[[_Function], _Function]:
    """Decorates `forward` of a `torch.autograd.Function` for use inside a region.

    Replaces `torch.amp.custom_fwd`. A function with `setup_context` decorates that too, since its
    `forward` has no `ctx` to remember anything in.

    Args:
        fwd: The `forward` (or `setup_context`) to decorate.
        device_type: Such as "cuda" or "cpu". Default: the accelerator in use, else the CPU.
        cast_inputs: The dtype to which float tensors (float64 excepted) are cast inside a region,
            where `forward` and `backward` then run without autocast. Default: both run with the
            autocast state of the call. Outside of every region nothing is changed.

    Example:
        >>> import torch
        >>> class Double(torch.autograd.Function):
        ...     @staticmethod
        ...     @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        ...     def forward(ctx, x):
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     @custom_bwd(device_type="cpu")
        ...     def backward(ctx, gradient):
        ...         return gradient * 2
        >>> from halfstep.torch import autocast
        >>> with autocast("cpu"):
        ...     Double.apply(torch.ones(1, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    device = check_device(device_type or default_device(), enabled=False)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        island = cast_inputs is not None and torch.is_autocast_enabled(device)
        state = snapshot(device, island)
        if args and hasattr(args[0], "save_for_backward"):
            _remember(args[0], state)
        if not island:
            return fwd(*args, **kwargs)
        with Restored(state):
            return fwd(*_cast(args, device, cast_inputs), **_cast(kwargs, device, cast_inputs))

    return forward


def custom_bwd(
    bwd: _Function | None = None, *, device_type: str | None = None
) -> _Function | Callable[[_Function], _Function]:
    """Decorates `backward` of a `torch.autograd.Function`: it runs with the state of `forward`.

    Replaces `torch.amp.custom_bwd`.

    Args:
        bwd: The `backward` to decorate.
        device_type: Such as "cuda" or "cpu". Default: the accelerator in use, else the CPU.

    Raises:
        UsageError: When backward runs and `forward` was not decorated with `custom_fwd`.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    device = check_device(device_type or default_device(), enabled=False)

    @functools.wraps(bwd)
    def backward(ctx: Any, *gradients: Any) -> Any:
        with Restored(_recall(ctx, device, bwd)):
            return bwd(ctx, *gradients)

    return backward


def _remember(ctx: Any, state: Snapshot) -> None:
    setattr(ctx, _KEY, state)
    # The names that PyTorch's own custom_bwd reads, should the two be mixed.
    ctx._fwd_used_autocast, ctx._dtype = state.enabled, state.dtype


def _recall(ctx: Any, device: str, bwd: _Function) -> Snapshot:
    state = getattr(ctx, _KEY, None)
    if state is not None:
        return state
    if hasattr(ctx, "_fwd_used_autocast"):
        return Snapshot(device, ctx._dtype, ctx._fwd_used_autocast, False, "")
    raise UsageError(
        f"{bwd.__qualname__} needs the autocast state of its forward, and none was remembered. "
        "Decorate forward with @custom_fwd, and if the class has setup_context decorate that with "
        "@custom_fwd as well."
    )


def _cast(value: Any, device_type: str, dtype: torch.dtype | None) -> Any:
    """Casts the float tensors in tuples, lists and dicts; leaves everything else alone."""
    if isinstance(value, Tensor):
        fits = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if fits and on_device(device_type)(value) else value
    if isinstance(value, Mapping):
        return {key: _cast(item, device_type, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_cast(item, device_type, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
