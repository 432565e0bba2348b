"""Counts what goes in and out of the modules of a model, forward and backward, by its role."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from halfstep.core import Exponents
from halfstep.torch._dtypes import format_of
from halfstep.torch._engine._paths import _unwrapped
from halfstep.torch._observing._exponents import Taken, Tally
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


class Seen:
    """Which tensors were seen in which role, each counted once while it does not change.

    Args:
        tally: Where their values are counted, by a number of their own.
    """

    def __init__(self, tally: Tally[int]) -> None:
        self._tally = tally
        self._numbers: dict[Role, list[int]] = {}
        self._known: dict[int, tuple[TensorWeakRef, int, int]] = {}
        self._counted = 0
        # The name of the format in which the values of each role came first.
        self.formats: dict[Role, str] = {}

    def add(self, role: Role, tensors: list[Tensor]) -> None:
        """Counts what is in tensors, for a role."""
        for each in tensors:
            if each.is_floating_point() or each.is_complex():
                self.formats.setdefault(role, format_of(each.dtype))
                self._numbers.setdefault(role, []).append(self._number(each))

    def read(self, taken: Taken[int] | None = None) -> dict[Role, Exponents]:
        """Returns the exponents of each role, from what was taken out of the tally or is there."""
        values = (taken or self._tally).read()
        return {
            role: sum((values[number] for number in numbers if number in values), Exponents())
            for role, numbers in self._numbers.items()
        }

    def forget(self) -> None:
        """Lets go of the tensors."""
        self._known.clear()

    def _number(self, tensor: Tensor) -> int:
        version = -1 if tensor.is_inference() else tensor._version
        found, before, number = self._known.get(id(tensor), (None, 0, 0))
        if found is None or found() is not tensor or before != version:
            number = self._counted = self._counted + 1
            self._known[id(tensor)] = TensorWeakRef(tensor), version, number
            self._tally.add(number, tensor)
        return number


class Observer:
    """Counts the values of each role while a model runs; nothing of it stays afterwards.

    Inside of a region it sees what the region computes with: the format, and scaled gradients.

    Args:
        model: The model.
        tally: Where values are counted; nothing else may be until they are read.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> with Observer(model, Tally()) as observer:
        ...     model(torch.ones(4, 2)).sum().backward()
        >>> observer.seen.read()[Role("Linear", "grad_output")].counts
        ((0, 4),)
    """

    def __init__(self, model: nn.Module, tally: Tally[int]) -> None:
        self._model = model
        self.seen = Seen(tally)
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
        self.seen.forget()

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _nobody, ()

    def _see_weight(self, path: str, parameter: Tensor) -> None:
        self.seen.add(Role(path, "weight"), [parameter])
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
                self.seen.add(Role(path, name), tensors)
            hook = functools.partial(self._see_gradient, Role(path, f"grad_{name}"))
            for tensor in tensors if torch.is_grad_enabled() else ():
                if tensor.requires_grad:
                    tensor.register_hook(hook)

    def _see_gradient(self, role: Role, gradient: Tensor | None) -> None:
        # There is none for what comes with an output and does not go into the loss.
        if not self._modules or gradient is None:
            return
        self.backward = True
        self.seen.add(role, [gradient])

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
