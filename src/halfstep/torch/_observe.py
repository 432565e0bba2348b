"""What every operation of a training step read and wrote, counted by exponent."""

from collections.abc import Callable
from typing import Any

from torch import nn

from halfstep.core import Observation, Policy
from halfstep.torch._observing._observation import observation
from halfstep.torch._observing._step import Case
from halfstep.torch._tried import tried


def observe(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    policy: Policy | str | None = None,
    loss_scale: float = 1.0,
) -> Observation:
    """Returns the numbers of every operation of a step, forward and backward, and of float32.

    The step runs as it is and in float32, and each tensor is counted on its device. What `diagnose`
    leaves as it is, this does, too.

    Args:
        model: The model, as `diagnose` takes it.
        batch: Likewise.
        loss_fn: Likewise.
        policy: Likewise.
        loss_scale: Likewise.

    Returns:
        A row for each tensor that an operation read or wrote.

    Raises:
        UsageError: It is nothing that `diagnose` takes.
        PolicyError: The policy cannot be read or followed.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.ones(8, 4)
        >>> def loss_fn(model, batch):
        ...     return model(batch).mean() * 2.0**-28
        >>> seen = observe(model, batch, loss_fn, policy="mixed_float16, scale=none")
        >>> for each in seen.of(operation="cast", role="grad_input"):
        ...     print(each.module, each.phase, each.form, each.lost)
        Sequential backward float16 1.0
    """
    case = Case(model, batch, loss_fn, loss_scale, caller="observe")
    with tried(case, policy):
        return observation(case)
