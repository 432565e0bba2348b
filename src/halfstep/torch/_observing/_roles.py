"""Counts what goes in and out of the modules of a model, forward and backward, by its role."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from halfstep.torch._dtypes import name_of
from halfstep.torch._engine._paths import _unwrapped
from halfstep.torch._observing._exponents import Tally
from halfstep.torch._private import in_backward, never_compile
from halfstep.torch._regions._forward import forward_of
from halfstep.torch._regions._tree import tensors_in

ROLES = ("input", "weight", "output", "grad_output", "grad_input", "grad_weight")


class Role(NamedTuple):
    """What a tensor is to a module.

    Args:
        module: The dotted path of the module; the name of its class for the model itself.
        name: "input", "weight", "output", "grad_output", "grad_input" or "grad_weight".
    """

    module: str
    name: str


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that compute something themselves, by path.

    Those are the ones with parameters of their own, and those without modules inside.

    Example:
        >>> list(named_modules(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))))
        ['0', '1.0']
    """
    whole = _unwrapped(model)
    found = {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): each
        for name, each in whole.named_modules()
        if each._parameters or not any(True for _ in each.children())
    }
    return {name or type(whole).__name__: each for name, each in found.items()}


class Observer:
    """Counts the values of each role while a model runs; nothing of it stays afterwards.

    Inside of a region it sees what the region computes with: the format, and scaled gradients.

    Args:
        model: The model.
        tally: Where values are counted, by role.

    Example:
        >>> import torch
        >>> model, tally = nn.Linear(2, 1), Tally()
        >>> with Observer(model, tally):
        ...     model(torch.ones(4, 2)).sum().backward()
        >>> tally.read()[Role("Linear", "grad_output")].counts
        ((0, 4),)
    """

    def __init__(self, model: nn.Module, tally: Tally[Role]) -> None:
        self._model, self._tally = model, tally
        # The name of the format in which the values of each role came first.
        self.formats: dict[Role, str] = {}
        # Whether a gradient has come.
        self.backward = False
        # Those that are looked at. A copy of the model takes the hooks along, and is not.
        self._modules: dict[str, nn.Module] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        seen: set[int] = set()
        self._modules = named_modules(self._model)
        for path, module in self._modules.items():
            hook = functools.partial(self._see_call, path)
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    self._see_weight(path, parameter)
        self._look_inside(set[int].update)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._look_inside(set[int].difference_update)
        for handle in self._handles:
            handle.remove()
        self._handles, self._modules = [], {}

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()

    def _see_weight(self, path: str, parameter: Tensor) -> None:
        self._see(Role(path, "weight"), [parameter])
        if parameter.requires_grad:
            hook = functools.partial(self._see_gradient, Role(path, "grad_weight"))
            self._handles.append(parameter.register_hook(hook))

    def _see_call(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._modules.get(path) is not module:
            return
        for name, values in (("input", (args, kwargs)), ("output", output)):
            tensors = tensors_in(values)
            # Within a backward pass it is a checkpoint that computes its part again.
            if not in_backward():
                self._see(Role(path, name), tensors)
            hook = functools.partial(self._see_gradient, Role(path, f"grad_{name}"))
            for tensor in tensors if torch.is_grad_enabled() else ():
                if tensor.requires_grad:
                    tensor.register_hook(hook)

    def _see_gradient(self, role: Role, gradient: Tensor) -> None:
        if not self._modules:
            return
        self.backward = True
        self._see(role, [gradient])

    def _see(self, role: Role, tensors: list[Tensor]) -> None:
        for each in tensors:
            if each.is_floating_point():
                self.formats.setdefault(role, name_of(each.dtype))
        self._tally.add(role, tensors)

    def _look_inside(self, change: Callable[[set[int], list[int]], None]) -> None:
        """Makes regions show these hooks what is inside of them, or not any more."""
        keys = [handle.id for handle in self._handles]
        for module in self._model.modules():
            forward = forward_of(module)
            if forward is not None:
                change(forward.region._own_hooks, keys)


def _nobody() -> Observer:
    """Returns what looks at nothing, for hooks that were pickled with a model."""
    return Observer(nn.Identity(), Tally())


for _method in (Observer._see_call, Observer._see_gradient):
    never_compile(_method)
