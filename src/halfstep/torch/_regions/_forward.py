"""The forward of a module that is a region."""

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.torch._autocast import Inside, Settings, settings_of
from halfstep.torch._private import never_compile, set_frame_compiler
from halfstep.torch._regions import _call, _graph
from halfstep.torch._regions._slots import (
    Substitution,
    attributes,
    modules_of,
    parameters,
    put,
    unique,
)
from halfstep.torch._regions._strays import refuse_strays
from halfstep.torch._regions._tree import cast, cast_tensor, tensors_in, with_tensors
from halfstep.torch._tracing import ready

if TYPE_CHECKING:
    from halfstep.torch._region import Region


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ready()
        if not torch.compiler.is_compiling():
            return self._run(self.__wrapped__, args, kwargs)
        capture = self.region._capture
        if capture.broken:
            return _around_graphs(self, args, kwargs)
        capture.begins()
        output = self._run(self.__wrapped__, args, kwargs)
        capture.ends()
        return output

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = self.region
        settings = settings_of(region._policy, device_of(self._owner()).type)
        if not settings.enabled:
            # Weights in float32 and no autocast need inputs in float32.
            args, kwargs = cast(args, torch.float32), cast(kwargs, torch.float32)
        if region._scaled and torch.is_grad_enabled():
            return self._locked(forward, settings, args, kwargs)
        with Inside(settings):
            output = forward(*args, **kwargs)
        return cast(output, region._output_dtype)

    def _locked(
        self, forward: Callable[..., Any], settings: Settings, args: Any, kwargs: Any
    ) -> Any:
        """Lets one thread run at a time, because what the module holds changes meanwhile."""
        if torch.compiler.is_compiling():
            return self._scaled(forward, settings, args, kwargs)
        with self._lock:
            return self._scaled(forward, settings, args, kwargs)

    def _scaled(
        self, forward: Callable[..., Any], settings: Settings, args: Any, kwargs: Any
    ) -> Any:
        """Runs a forward inside of which gradients are scaled."""
        module, region = self._owner(), self.region
        modules, given = modules_of(module), tensors_in((args, kwargs))
        found = parameters(modules) + attributes(modules)
        held = unique(found)
        before = [*held.values(), *(each for each in given if each.requires_grad)]
        _graph.begin(region._cells_for(before), region._rule)
        try:
            after = _graph.enter(before) if before else []
            args, kwargs = _with_entered(args, kwargs, given, after[len(held) :])
            _mark_call(region)
            with Substitution(found, dict(zip(held, after, strict=False))), Inside(settings):
                output = forward(*args, **kwargs)
            _check_call(region, module, output, after)
            return _leave(output, region._output_dtype, modules, held)
        finally:
            _graph.end()

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module = self._owner()
        return self.original or type(module).forward.__get__(module)

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


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module: that of its first parameter."""
    for parameter in module.parameters():
        return parameter.device
    return torch.device("cpu")


def _with_entered(
    args: Any, kwargs: Any, given: Sequence[Tensor], entered: Sequence[Tensor]
) -> tuple[Any, Any]:
    """Returns the arguments with what has a gradient as the region sees it."""
    if not entered:
        return args, kwargs
    rest = iter(entered)
    tensors = [next(rest) if each.requires_grad else each for each in given]
    entered_args, entered_kwargs = with_tensors((args, kwargs), tensors)
    return entered_args, entered_kwargs


def _mark_call(region: "Region") -> None:
    """Lets what is computed again in backward find its module; a graph holds both anyway."""
    if not torch.compiler.is_compiling():
        _call.current().module = region._module


def _check_call(
    region: "Region", module: nn.Module, output: Any, entered: Sequence[Tensor]
) -> None:
    """Looks, ever more rarely, whether the forward read what had not entered."""
    if torch.compiler.is_compiling():
        return
    region._calls += 1
    if region._calls.bit_count() == 1:
        refuse_strays(tensors_in(output), entered, type(module).__name__)


def _leave(
    output: Any, dtype: torch.dtype, modules: list[nn.Module], held: dict[int, Tensor]
) -> Any:
    """Returns the output as it is seen outside of the region, and lets new attributes out too."""
    tensors = tensors_in(output)
    kept = [slot for slot in attributes(modules) if id(slot[2]) not in held]
    leaving = [each for each in tensors if each.requires_grad] + [tensor for *_, tensor in kept]
    left = iter(_graph.leave([_copied(each, dtype) for each in leaving]) if leaving else ())
    rest = [next(left) if each.requires_grad else cast_tensor(each, dtype) for each in tensors]
    for slot in kept:
        put(slot, next(left))
    return with_tensors(output, rest)


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy: what is inside must not change when somebody writes to what is outside."""
    changed = cast_tensor(tensor, dtype)
    return changed.clone() if changed is tensor else changed


def _around_graphs(forward: Forward, args: Any, kwargs: Any) -> Any:
    """Lets the parts of a forward that does not fit one graph be compiled, and nothing else."""
    compiler = set_frame_compiler(None)
    try:
        compiled = functools.partial(_run_compiled, compiler, forward.__wrapped__)
        return forward._run(compiled, args, kwargs)
    finally:
        set_frame_compiler(compiler)


def _run_compiled(compiler: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    set_frame_compiler(compiler)
    try:
        return forward(*args, **kwargs)
    finally:
        set_frame_compiler(None)


never_compile(_around_graphs, callees=True)
_around_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]
