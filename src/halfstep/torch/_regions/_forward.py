"""The forward of a module that is a region."""

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from halfstep.torch._autocast import Inside, Settings
from halfstep.torch._engine._paths import PATHS
from halfstep.torch._once import once
from halfstep.torch._private import (
    break_graphs,
    never_compile,
    set_frame_compiler,
    with_own_code,
)
from halfstep.torch._regions import _graph
from halfstep.torch._regions._hooks import casting_hooks, crossing_hooks
from halfstep.torch._regions._passage import Passage
from halfstep.torch._regions._slots import (
    Substitution,
    arguments,
    attributes,
    distinct,
    has_lazy,
    modules_of,
    parameters,
)
from halfstep.torch._regions._tree import cast
from halfstep.torch._tracing import constant, ready

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
        self.compile_anew()

    def compile_anew(self) -> None:
        """Forgets what was compiled of it, with the rules that there were."""
        self._enter = with_own_code(Forward._called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.region._used = True
        releases = self.region._releases or ()
        for each in releases:
            each.call()
        kept = self.region._handler.keep(args, kwargs)
        output = self._enter(self, args, kwargs)
        if kept is not None:
            kept.watch(output)
        for each in releases:
            each.left(output)
        return output

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ready()
        if is_exporting():
            return self._original(*args, **kwargs)
        if not torch.compiler.is_compiling():
            if not self.region._located:
                return self._run(self._original, args, kwargs)
            with PATHS.rooted(self._owner()):
                return self._run(self._original, args, kwargs)
        capture = self.region._capture
        if capture.broken:
            return _around_graphs(self, args, kwargs)
        capture.begins()
        output = self._run(self._original, args, kwargs)
        capture.ends()
        return output

    def _run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = self.region
        device = device_of(self._owner())
        if device.type == "meta":
            return forward(*args, **kwargs)
        settings = region._settings(device.type)
        if not settings.enabled:
            # Weights in float32 and no autocast need inputs in float32.
            args, kwargs = cast(args, torch.float32), cast(kwargs, torch.float32)
        if region._scaled and torch.is_grad_enabled():
            return self._locked(forward, settings, args, kwargs)
        dtype, inner = region._output_dtype, modules_of(self._owner())[1:]
        with casting_hooks(inner, dtype, region._own_hooks), Inside(settings):
            output = forward(*args, **kwargs)
        return cast(output, dtype)

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
        region, modules = self.region, modules_of(self._owner())
        args, places = [*args], parameters(modules) + attributes(modules)
        places += arguments(args, kwargs)
        if has_lazy(places):
            with Inside(settings):
                return cast(forward(*args, **kwargs), region._output_dtype)
        tensors, indices = distinct(places)
        _graph.begin(region._cells_for(tensors), region._rule)
        try:
            passage = Passage(region, modules, tensors, _graph.enter(tensors))
            around = Substitution(places, [passage.inside[index] for index in indices])
            dtype, own = region._output_dtype, region._own_hooks
            with around, crossing_hooks(modules[1:], dtype, around, own), Inside(settings):
                output = forward(*args, **kwargs)
            return passage.leave(output, args, kwargs)
        finally:
            _graph.end()

    def _original(self, *args: Any, **kwargs: Any) -> Any:
        if self.original is not None:
            return self.original(*args, **kwargs)
        module = self._owner()
        return type(module).forward(module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        module = self._owner()
        return self.original or type(module).forward.__get__(module)

    def _owner(self) -> nn.Module:
        module = self._module()
        assert module is not None  # it holds this, and calls it
        return module

    def __getattr__(self, name: str) -> Any:
        # What is asked of a method, such as its code and its globals.
        return getattr(self.__wrapped__, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        module = memo.get(id(self._owner()), self._owner())
        original = copy.deepcopy(self.original, memo)
        return Forward(self.region._copied(module, memo), module, original)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.original is not None:
            return functools.partial, (self.original,)
        return getattr, (self._owner(), "forward")


# Run for real by a tracer, which answers the question itself, and not in every version right.
@constant
def is_exporting() -> bool:
    """Returns whether a program is made of the model, which can hold no region."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def forward_of(module: nn.Module) -> Forward | None:
    """Returns the forward of a module that is a region, None for any other module."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, Forward) else None


def own_modules(module: nn.Module) -> list[nn.Module]:
    """Returns the modules that are in the region of a module, without regions of their own."""
    found = {module: None}
    waiting = [module]
    while waiting:
        for child in waiting.pop().children():
            if child not in found and forward_of(child) is None:
                found[child] = None
                waiting.append(child)
    return list(found)


def own_parameters(module: nn.Module) -> list[Tensor]:
    """Returns the parameters in the region of a module, each once."""
    modules = own_modules(module)
    return once(each for module in modules for each in module.parameters(recurse=False))


def device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module: that of its first parameter."""
    return _device_of(module) or torch.device("cpu")


def _device_of(module: nn.Module) -> torch.device | None:
    # What `parameters()` finds first, in a tenth of its time.
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter.device
    for child in module._modules.values():
        found = None if child is None else _device_of(child)
        if found is not None:
            return found
    return None


def _around_graphs(forward: Forward, args: Any, kwargs: Any) -> Any:
    """Lets the parts of a forward that does not fit one graph be compiled, and nothing else."""
    compiler = set_frame_compiler(None)
    try:
        compiled = functools.partial(_run_compiled, compiler, forward._original)
        return forward._run(compiled, args, kwargs)
    finally:
        set_frame_compiler(compiler)


def _run_compiled(compiler: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    set_frame_compiler(compiler)
    try:
        return forward(*args, **kwargs)
    finally:
        set_frame_compiler(None)


# What is compiled is the copy of `_called` that each region has: of one function with one code, a
# compiler keeps only a few graphs.
never_compile(Forward.__call__, callees=True)
break_graphs(
    _around_graphs,
    callees=True,
    reason="the region is compiled around its graphs, because its forward breaks the graph, has "
    "hooks on modules inside, or PyTorch is older than 2.13. Leave out fullgraph=True",
)
