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

    The step runs as it is and in float32, and each tensor is counted on its device. Parameters,
    gradients, buffers, random numbers and regions stay what they are, and hooks on accumulated
    gradients do not run. Compiled models run eagerly.

    Args:
        model: The model, as it trains: prepared, or called inside of autocast by `loss_fn`.
        batch: What `loss_fn` is called with.
        loss_fn: Calls the model that it is given with the batch, and returns the loss, on which
            training calls `backward()`, and it does not.
        policy: Runs the model as if it had been given to `prepare` with this policy.
        loss_scale: What multiplies the loss, such as `scaler.get_scale()`. A region has a scale of
            its own, so it does not go together with a policy that has one.

    Returns:
        A row for each tensor that an operation read or wrote.

    Raises:
        UsageError: The model is no module, has parameters that are still to be made, or is a region
            where there is a policy, too; the loss is not computed of the model, is not one number,
            or was gone through backward already; its scale is not above zero, or beside that of a
            policy; autocast is entered around the call.
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
