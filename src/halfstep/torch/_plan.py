"""A policy for a model, found by measuring it on this machine."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from halfstep.core import Plan
from halfstep.errors import UsageError
from halfstep.torch._global import policy_for
from halfstep.torch._observing._step import Case
from halfstep.torch._planning._search import Search
from halfstep.torch._planning._steps import Trial
from halfstep.torch._regions._forward import device_of, forward_of
from halfstep.torch._tried import tried


def plan(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    budget: float = 0.05,
    seconds: float = 30.0,
    tell: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Finds the policy under which a step of training is fastest on this machine, by measuring.

    The operations of a step are timed one by one, forward and backward, in float32 and in each low
    format, with what they keep for backward and how far they are from float32. From that come
    rules that make the step cheapest, casts included. Then whole steps decide between them, the
    named policies and PyTorch's own rules. Where nothing is faster than float32, that is the plan.

    What the default rules keep in float32 stays there. Nothing keeps more for backward than the
    fastest of the policies without rules of their own. Parameters, gradients, buffers and random
    numbers stay what they are. Compiled models run eagerly.

    Args:
        model: The model, in float32, on the device on which it trains, in training mode.
        batch: What `loss_fn` is called with.
        loss_fn: Returns the loss of a model and a batch.
        budget: How far results and gradients of an operation in a low format may be from those in
            float32: the norm of the difference, over theirs.
        seconds: About how long to measure.
        tell: Is called with a line of text for each part of the work.

    Returns:
        The policy, and what was measured.

    Raises:
        UsageError: The model is no module, is prepared already or has parameters in half precision;
            the loss is not one number; a number is not above zero.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(8, 2), torch.ones(4, 8)
        >>> found = plan(model, batch, lambda model, batch: model(batch).mean(), seconds=0.1)
        >>> found.machine.device, found.candidates[0].policy == str(found.policy)
        ('cpu', True)
    """
    for name, value in (("budget", budget), ("seconds", seconds)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UsageError(f"plan needs {name} above zero, got {value!r}. Write {name}=0.05.")
    case = Case(model, batch, loss_fn, caller="plan")
    if policy_for(model).compute_dtype != "float32" or any(map(forward_of, _modules(model))):
        raise UsageError(
            f"plan needs a model that nobody has prepared, in whole or in part, got "
            f"{type(model).__name__} that a region or the global policy lowers. Call remove() on "
            'the region first, or set_global_policy("float32").'
        )
    with tried(case, None):
        trial = Trial(model, batch, loss_fn, device_of(model).type)
        with trial.untouched():
            trial.check()
            return Search(trial, budget, seconds, tell).plan()


def _modules(model: Any) -> Iterator[nn.Module]:
    """Yields what is inside of a model; what is no model is refused elsewhere."""
    return model.modules() if isinstance(model, nn.Module) else iter(())
