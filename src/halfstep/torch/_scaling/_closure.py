"""Optimizer steps that evaluate the loss themselves, by calling a closure."""

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.torch._masters._views import optimizers_in
from halfstep.torch._scaling._gradients import gradients_of, parameters_of
from halfstep.torch._scaling._one_pass import clip, lazily
from halfstep.torch._scaling._widening import narrow_gradients

if TYPE_CHECKING:
    from halfstep.torch._scaler import GradScaler

Closure = Callable[[], Any]


class NonFiniteEvaluationError(Exception):
    """Leaves an optimizer in the middle of a step; it never reaches the user."""


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Closure | None:
    """Returns the closure among the arguments of a step, by position or by name."""
    closure = kwargs.get("closure", args[0] if args else None)
    return closure if callable(closure) else None


def needs_closure(kind: Any) -> bool:
    """Returns whether optimizers of a class cannot step without a closure, as their step says."""
    found = inspect.signature(kind.step).parameters.get("closure")
    return found is not None and found.default is inspect.Parameter.empty


def with_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], closure: Closure
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a step with another closure in the same place."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (closure, *args[1:]), kwargs


def without_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a step without its closure."""
    return args[1:], {key: value for key, value in kwargs.items() if key != "closure"}


class Evaluation:
    """A closure after which the optimizer finds true-valued, finite gradients.

    Args:
        scaler: The scaler that the closure scales its loss with, if it does.
        optimizer: The optimizer that is stepping.
        closure: Computes the loss and its gradients.
        max_norm: What the gradients of each evaluation are clipped to, or None.
    """

    def __init__(
        self,
        scaler: "GradScaler",
        optimizer: Optimizer,
        closure: Any,
        max_norm: float | None = None,
    ) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        self._closure = closure
        self._max_norm = max_norm

    def __call__(self) -> Any:
        scaler = self._scaler
        state = scaler._per_optimizer_states[id(self._optimizer)]
        state["stage"], state["bad"] = OptState.READY, None
        narrow_gradients(state["widened"])
        calls = scaler._scale_calls
        loss = self._closure()
        if scaler._scale_calls != calls:
            if state["stage"] is OptState.READY:
                scaler.unscale_(self._optimizer)
            if any(found.item() for found in state["found_inf_per_device"].values()):
                raise NonFiniteEvaluationError
        self._clip()
        return loss

    def _clip(self) -> None:
        gradients = gradients_of(self._optimizer)
        if self._max_norm is None or not gradients:
            return
        norm = clip(gradients, self._max_norm)
        self._scaler._norm = lazily(norm)
        # Sums that overflowed, where only a device knows the numbers.
        if not norm.is_cpu and not norm.isfinite().item():
            raise NonFiniteEvaluationError


class Snapshot:
    """The parameters, state and settings of an optimizer as they were before a step.

    Args:
        optimizer: The optimizer.
        others: More tensors that the step may change, such as masters.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(2))
        >>> snapshot = Snapshot(torch.optim.SGD([parameter]))
        >>> _ = parameter.data.zero_()
        >>> snapshot.restore()
        >>> parameter.tolist()
        [1.0, 1.0]
    """

    def __init__(self, optimizer: Optimizer, others: Iterable[Tensor] = ()) -> None:
        self._groups = [(group, _settings_of(group)) for group in optimizer.param_groups]
        tensors: list[Tensor] = [*parameters_of(optimizer), *others]
        for group, _ in self._groups:
            tensors += [value for value in group.values() if isinstance(value, Tensor)]
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._states = [
            (each.state, {key: copy.deepcopy(state) for key, state in each.state.items()})
            for each in optimizers_in(optimizer)
        ]

    def restore(self) -> None:
        """Undoes whatever the step did."""
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        for group, settings in self._groups:
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
        for state, before in self._states:
            state.clear()
            state.update(before)


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Returns copies of the settings of a group; tensors stay the same objects."""
    return {
        key: value if isinstance(value, Tensor) else copy.deepcopy(value)
        for key, value in group.items()
        if key != "params"
    }
