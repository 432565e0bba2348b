"""The forward of a module that is a region."""

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.torch._autocast import Inside, Settings, settings_of
from halfstep.torch._regions import _call, _graph
from halfstep.torch._regions._slots import Substitution, slots, unique
from halfstep.torch._regions._strays import refuse_strays
from halfstep.torch._regions._tree import tensors_in, with_tensors
from halfstep.torch._tracing import ready

if TYPE_CHECKING:
    from halfstep.torch._region import Region

_CAST = (torch.float32, torch.float16, torch.bfloat16)


class Forward:
    """What stands in the `__dict__` of a module as its forward.

    It keeps no module alive, is copied with the module, and leaves a pickle as the plain forward,
    which needs no halfstep to be loaded.

    Args:
        region: The region.
        module: The module whose forward it is.
        original: A forward that the instance had of its own, None for that of its class.
    """

    def __init__(
        self, region: "Region", module: nn.Module, original: Callable[..., Any] | None
    ) -> None:
        self.region = region
        self.original = original
        self._module = weakref.ref(module)
        self._lock = threading.RLock()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.original or _of_class(self._owner())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ready()
        module, region = self._owner(), self.region
        forward = self.original or _of_class(module)
        settings = settings_of(region._policy, device_of(module).type)
        if not settings.enabled:
            # Weights in float32 and no autocast need inputs in float32.
            args, kwargs = cast(args, torch.float32), cast(kwargs, torch.float32)
        if not (region._scaled and torch.is_grad_enabled()):
            with Inside(settings):
                output = forward(*args, **kwargs)
            return cast(output, region._output_dtype)
        if torch.compiler.is_compiling():
            return _scaled(region, module, forward, settings, args, kwargs)
        # One thread at a time, because what the module holds changes while it runs.
        with self._lock:
            region._calls += 1
            return _scaled(region, module, forward, settings, args, kwargs)

    def _owner(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it holds this, and calls it
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        module = memo.get(id(self._owner()), self._owner())
        return Forward(self.region._copied(module), module, copy.deepcopy(self.original, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.original is not None:
            return functools.partial, (self.original,)
        return getattr, (self._owner(), "forward")


def _of_class(module: Any) -> Callable[..., Any]:
    return type(module).forward.__get__(module)


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module: that of its first parameter."""
    for parameter in module.parameters():
        return parameter.device
    return torch.device("cpu")


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns the same nesting with the floats of at most 32 bits in one dtype."""
    tensors = tensors_in(value)
    if all(each.dtype is dtype or each.dtype not in _CAST for each in tensors):
        return value
    return with_tensors(value, [_cast(each, dtype) for each in tensors])


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in _CAST else tensor


def _scaled(
    region: "Region",
    module: nn.Module,
    forward: Callable[..., Any],
    settings: Settings,
    args: Any,
    kwargs: Any,
) -> Any:
    """Runs a forward whose gradients are scaled inside the region."""
    found = slots(module)
    held = unique(found)
    given = tensors_in((args, kwargs))
    inputs = [each for each in given if each.requires_grad]
    before = [*held.values(), *inputs]
    _graph.begin(region._cells_for(before), region._rule)
    try:
        after = _graph.enter(before) if before else []
        new = dict(zip(held, after, strict=False))
        if inputs:
            rest = iter(after[len(held) :])
            put = [next(rest) if each.requires_grad else each for each in given]
            args, kwargs = with_tensors((args, kwargs), put)
        if not torch.compiler.is_compiling():
            _call.current().module = region._module
        with Substitution(found, new), Inside(settings):
            output = forward(*args, **kwargs)
        if not torch.compiler.is_compiling() and region._calls.bit_count() == 1:
            refuse_strays(tensors_in(output), after, type(module).__name__)
        return _leave(region, module, output, held)
    finally:
        _graph.end()


def _leave(region: "Region", module: nn.Module, output: Any, held: dict[int, Tensor]) -> Any:
    """Returns the output as it is seen outside of the region."""
    casts = [_cast(each, region._output_dtype) for each in tensors_in(output)]
    out = [each for each in casts if each.requires_grad]
    kept = [slot for slot in slots(module) if id(slot.tensor) not in held]
    out += [_cast(slot.tensor, region._output_dtype) for slot in kept]
    left = iter(_graph.leave([each.clone() for each in out]) if out else ())
    output = with_tensors(output, [next(left) if each.requires_grad else each for each in casts])
    for slot in kept:
        slot.put(next(left))
    return output
