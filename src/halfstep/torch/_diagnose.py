"""Which operation of a training step made the first inf or NaN, and what to write instead."""

from collections.abc import Callable
from typing import Any

from torch import nn

from halfstep.core import Diagnosis, Policy
from halfstep.torch._observing._diagnosis import diagnosis
from halfstep.torch._observing._step import Case
from halfstep.torch._tried import tried


def diagnose(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[[Any, Any], Any],
    *,
    policy: Policy | str | None = None,
    loss_scale: float = 1.0,
) -> Diagnosis:
    """Returns which operation of a step made the first inf or NaN, and what to write instead.

    The step runs forward and backward a few times: as it is, in float32 to tell whether low
    precision is to blame, and with the remedies. Parameters, gradients, buffers, random numbers and
    regions stay what they are, and hooks on accumulated gradients do not run. Compiled models run
    eagerly.

    Args:
        model: The model, as it trains: prepared, or called inside of autocast by `loss_fn`.
        batch: What `loss_fn` is called with.
        loss_fn: Calls the model that it is given with the batch, and returns the loss, on which
            training calls `backward()`, and it does not.
        policy: Runs the model as if it had been given to `prepare` with this policy.
        loss_scale: What multiplies the loss, such as `scaler.get_scale()`. A region has a scale of
            its own, so it does not go together with a policy that has one.

    Raises:
        UsageError: The model is no module, has parameters that are still to be made, or is a region
            where there is a policy, too; the loss is not computed of the model, is not one number,
            or was gone through backward already; its scale is not above zero, or beside that of a
            policy; autocast is entered around the call.
        PolicyError: The policy cannot be read or followed.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 2), torch.nn.Tanh())
        >>> _ = torch.nn.init.constant_(model[0].weight, 300.0)
        >>> def loss_fn(model, batch):
        ...     return model(batch).mean()
        >>> diagnosis = diagnose(model, torch.full((1, 64), 4.0), loss_fn, policy="mixed_float16")
        >>> diagnosis.first.module, diagnosis.first.operation, diagnosis.first.phase
        ('0', 'matmul', 'forward')
    """
    case = Case(model, batch, loss_fn, loss_scale)
    with tried(case, policy):
        return diagnosis(case)
