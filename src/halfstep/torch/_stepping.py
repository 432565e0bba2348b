"""Tells of gradients that are not finite before an optimizer steps by them."""

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from halfstep.core import emit
from halfstep.torch._observing._step import are_finite
from halfstep.torch._patches import Undo
from halfstep.torch._scaling._closure import closure_of, with_closure
from halfstep.torch._scaling._gradients import gradients_of


def note_broken() -> Undo:
    """Tells of such gradients as the event "nonfinite", and returns what ends it.

    What a guard or a scaler skips never gets there. After the step it would be too late to look:
    the parameters are broken, too.

    Example:
        >>> import torch
        >>> from halfstep.core import subscribe
        >>> unsubscribe = subscribe(lambda event, values: print(event))
        >>> end = note_broken()
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([1.0, torch.inf])
        >>> torch.optim.SGD([weight], lr=0.1).step()
        nonfinite
        >>> end()
        >>> unsubscribe()
    """
    return register_optimizer_step_pre_hook(_before).remove


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    itself, *others = args
    closure = closure_of(tuple(others), kwargs)
    if closure is None:
        _tell(optimizer)
        return None
    given, kwargs = with_closure(tuple(others), kwargs, _checked(optimizer, closure))
    return (itself, *given), kwargs


def _checked(optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    def evaluate() -> Any:
        loss = closure()
        _tell(optimizer)
        return loss

    return evaluate


def _tell(optimizer: Optimizer) -> None:
    # What a scaler hands over to the kernel, the kernel skips.
    if not hasattr(optimizer, "found_inf") and not are_finite(gradients_of(optimizer)):
        emit("nonfinite")
