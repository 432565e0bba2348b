"""What every step that is only tried needs: checks, and a process that does not notice."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halfstep.core import Policy, policy_words, quiet
from halfstep.errors import UsageError
from halfstep.torch._auto import asked_policy, settled
from halfstep.torch._engine._state import entered, on_trial
from halfstep.torch._global import is_fit, policy_for
from halfstep.torch._observing._step import Case
from halfstep.torch._prepare import prepare
from halfstep.torch._private import autocast_devices
from halfstep.torch._regions._forward import device_of, forward_of

Found = TypeVar("Found")

# What a training is told of, which is not one here.
TOLD_OF = ("backward", "loss", "region", "precision")


@contextlib.contextmanager
def tried(case: Case, policy: Policy | str | None) -> Iterator[None]:
    """Lets a step that can be run be run as under a policy, and nobody be told, within the block.

    Args:
        case: The step.
        policy: The policy; None leaves the model as it is.

    Raises:
        UsageError: The step cannot be run.
    """
    for check in (_refuse_autocast, _check_model, _check_scale):
        check(case)
    _refuse_two_scales(case, policy)
    with quiet(*TOLD_OF), on_trial(), _under(case, policy):
        yield


@contextlib.contextmanager
def _under(case: Case, policy: Policy | str | None) -> Iterator[None]:
    """Makes a model a region until the block ends."""
    model = case.model
    prepared = any(forward_of(each) for each in model.modules())
    everywhere = policy_for(model)
    as_it_is = prepared or everywhere.compute_dtype == "float32" or not is_fit(model)
    if policy is None and as_it_is:
        yield
        return
    if prepared:
        raise UsageError(
            f"{case.caller} needs a model that is not prepared to run it by "
            f"policy={str(policy)!r}, got {type(model).__name__}, which is. "
            "Leave out policy=, or call remove() on its region."
        )
    region = prepare(model, policy=policy or everywhere)
    region._used, region._automatic = True, policy is None
    try:
        yield
    finally:
        region.remove()


def _refuse_two_scales(case: Case, policy: Policy | str | None) -> None:
    if policy is None:
        return
    chosen = settled(asked_policy(policy), device_of(case.model), case.model)
    if chosen.scale.kind != "none" and case.loss_scale != 1.0:
        scaled = policy_words(chosen.with_(scale=f"static({float(case.loss_scale)!r})"))
        raise UsageError(
            f"{case.caller} needs either policy= or loss_scale=, got policy={str(policy)!r} and "
            f"loss_scale={case.loss_scale!r}: a region has a scale of its own. Leave out one, or "
            f"write policy={scaled!r}. Where a GradScaler scales, enter autocast in loss_fn."
        )


def outside_of_autocast(look: Callable[[], Found]) -> Found:
    """Returns what a function does outside of any autocast: a thread of its own is in none.

    Args:
        look: The function.
    """
    if not _in_autocast():
        return look()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(look).result()


def _in_autocast() -> bool:
    return entered() or any(map(torch.is_autocast_enabled, autocast_devices()))


def _refuse_autocast(case: Case) -> None:
    if _in_autocast():
        raise UsageError(
            f"{case.caller} needs to be called outside of autocast, which it would not see, and "
            "got it inside of one. Enter the autocast in loss_fn."
        )


def _check_model(case: Case) -> None:
    model: Any = case.model
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{case.caller} needs a torch.nn.Module, got {type(model).__name__}."
            f" Write {case.caller}(model, batch, loss_fn)."
        )
    for name, each in model.named_parameters():
        if is_lazy(each):
            raise UsageError(
                f"{case.caller} needs a model with all of its parameters, got {name} that its "
                "module is still to make. Call the model once before."
            )


def _check_scale(case: Case) -> None:
    scale: Any = case.loss_scale
    if not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise UsageError(
            f"{case.caller} needs a loss_scale above zero, got {scale!r}. Write loss_scale=2.0**16."
        )
