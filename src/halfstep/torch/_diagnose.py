"""Which operation of a training step made the first inf or NaN, and what to write instead."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halfstep.core import Diagnosis, Policy, quiet
from halfstep.errors import UsageError
from halfstep.torch._engine._state import entered, on_trial
from halfstep.torch._global import global_policy, is_fit
from halfstep.torch._observing._diagnosis import diagnosis
from halfstep.torch._observing._step import Case
from halfstep.torch._prepare import prepare
from halfstep.torch._private import autocast_devices
from halfstep.torch._regions._forward import forward_of

# What a training is told of, which a diagnosis is not.
_EVENTS = ("backward", "loss", "region")


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
        loss_fn: Returns the loss of a model and a batch, on which training calls `backward()`.
        policy: Runs the model as if it had been given to `prepare` with this policy.
        loss_scale: What multiplies the loss, such as `scaler.get_scale()`. A region has a scale of
            its own.

    Raises:
        UsageError: The model is no module, has parameters that are still to be made, or is a region
            where there is a policy, too; the loss is not one number, or its scale not above zero;
            autocast is entered around the call.
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
    _refuse_autocast()
    case = Case(_checked_model(model), batch, loss_fn, _checked_scale(loss_scale))
    with quiet(*_EVENTS), on_trial(), _under(model, policy):
        return diagnosis(case)


@contextlib.contextmanager
def _under(model: nn.Module, policy: Policy | str | None) -> Iterator[None]:
    """Makes a model a region until the block ends."""
    prepared = any(forward_of(each) for each in model.modules())
    everywhere = global_policy()
    as_it_is = prepared or everywhere.compute_dtype == "float32" or not is_fit(model)
    if policy is None and as_it_is:
        yield
        return
    if prepared:
        raise UsageError(
            f"diagnose needs a model that is not prepared to run it by policy={str(policy)!r}, got "
            f"{type(model).__name__}, which is. Leave out policy=, or call remove() on its region."
        )
    region = prepare(model, policy=policy or everywhere)
    region._used, region._automatic = True, policy is None
    try:
        yield
    finally:
        region.remove()


def _refuse_autocast() -> None:
    if entered() or any(map(torch.is_autocast_enabled, autocast_devices())):
        raise UsageError(
            "diagnose needs to be called outside of autocast, which it would not see, and got it "
            "inside of one. Enter the autocast in loss_fn."
        )


def _checked_model(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"diagnose needs a torch.nn.Module, got {type(model).__name__}."
            " Write diagnose(model, batch, loss_fn)."
        )
    for name, each in model.named_parameters():
        if is_lazy(each):
            raise UsageError(
                f"diagnose needs a model with all of its parameters, got {name} that its module "
                "is still to make. Call the model once before."
            )
    return model


def _checked_scale(scale: Any) -> float:
    if isinstance(scale, (int, float)) and 0 < scale < float("inf"):
        return float(scale)
    raise UsageError(
        f"diagnose needs a loss_scale above zero, got {scale!r}. Write loss_scale=2.0**16."
    )
