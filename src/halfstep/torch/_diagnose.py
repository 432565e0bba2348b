"""Which operation of a training step made the first inf or NaN, and what to write instead."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halfstep.core import Diagnosis, Fault, Policy, quiet
from halfstep.errors import UsageError
from halfstep.torch._engine._state import entered, on_trial
from halfstep.torch._global import global_policy, is_fit
from halfstep.torch._observing._formats import Formats
from halfstep.torch._observing._ran import Ran, Value
from halfstep.torch._observing._remedy import Remedies, attempted
from halfstep.torch._observing._settling import settled
from halfstep.torch._observing._step import Case, Step, run
from halfstep.torch._observing._trial import Kinds
from halfstep.torch._observing._verdict import faults, is_in_float32, underflows
from halfstep.torch._observing._ways import way_of
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
        return _diagnosis(case)


def _diagnosis(case: Case) -> Diagnosis:
    case, step = settled(case)
    in_float32 = _in_float32(case)
    way = way_of(case.model, step.asked)
    remedies = Remedies(case, step, in_float32, way)
    found = faults(step, in_float32)
    told = _told_faults(found, remedies) if found else _told_underflow(remedies)
    scale = case.loss_scale if way.region is None else way.region.scale * case.factor
    return Diagnosis(tuple(told), scale)


def _told_faults(found: list[Ran], remedies: Remedies) -> Iterator[Fault]:
    kinds = Kinds([each.key for each in found])
    run(dataclasses.replace(remedies.case, trial=kinds))
    for each in found:
        wide = is_in_float32(each, remedies.in_float32)
        remedy = remedies.of(each, in_float32=wide) if each is found[0] else ""
        yield dataclasses.replace(_fault(each, kinds), in_float32=wide, remedy=remedy)


def _told_underflow(remedies: Remedies) -> Iterator[Fault]:
    for each, value in underflows(remedies.step, remedies.in_float32):
        fault = _told(each, value, "underflow")
        yield dataclasses.replace(fault, remedy=remedies.of_underflow())
        return


def _in_float32(case: Case) -> Step:
    """Returns the step in float32, an empty one where it cannot run so."""
    wide = attempted(dataclasses.replace(case, formats=Formats(torch.float32)))
    return wide or Step((), loss_finite=False, gradients_finite=False)


def _fault(ran: Ran, kinds: Kinds) -> Fault:
    made = ran.bad
    assert made is not None  # or it would be no fault
    assert made.held is not None
    kind = "nan" if made.held.has_nan else "inf"
    fault = _told(ran, made, kinds.found.get(ran.key, kind))
    largest = made.held.largest if ran.entered else ran.largest
    return dataclasses.replace(fault, largest=largest)


def _told(ran: Ran, value: Value, kind: str) -> Fault:
    return Fault(
        module=ran.key.path,
        operation=ran.key.word,
        phase=ran.key.phase,
        role=value.role,
        kind=kind,
        dtype=value.dtype,
        shape=value.shape,
        largest=ran.largest,
        source=ran.source,
    )


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
