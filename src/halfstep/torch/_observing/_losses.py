"""Calls the loss of a step as a training does, and says what is wrong with one that is not so."""

import warnings
from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from halfstep.core import policy_words
from halfstep.errors import UsageError
from halfstep.torch._engine._paths import HOOKS_ARE_GLOBAL, _unwrapped
from halfstep.torch._regions._forward import forward_of

_WRITE = "Write loss_fn=lambda model, batch: loss(model(batch[0]), batch[1])."


def loss_of(caller: str, loss_fn: Callable[..., Any], model: nn.Module, batch: Any) -> Tensor:
    """Returns the loss of a model and a batch.

    Args:
        caller: Who is named in errors.
        loss_fn: Computes it.
        model: The model.
        batch: What the loss is computed of besides.

    Raises:
        UsageError: It is not computed of a model and a batch, or is not one number.

    Example:
        >>> import torch
        >>> loss_of("diagnose", nn.MSELoss(), nn.Linear(2, 1), torch.ones(1, 2))
        Traceback (most recent call last):
        ...
        halfstep.errors.UsageError: diagnose needs loss_fn(model, batch), which calls the model, \
got MSELoss, ...
    """
    called: list[bool] = []
    own = set(map(id, model.modules()))

    def note(module: nn.Module, _args: Any) -> None:
        called.extend([True] if id(module) in own else [])

    handle = _module.register_module_forward_pre_hook(note)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=HOOKS_ARE_GLOBAL)
            return _checked(caller, loss_fn(model, batch))
    except (TypeError, AttributeError) as error:
        if called:
            raise
        raise UsageError(
            f"{caller} needs loss_fn(model, batch), which calls the model, got {_name(loss_fn)}, "
            f"which raises {type(error).__name__}: {error}. {_WRITE}"
        ) from error
    finally:
        handle.remove()


def _checked(caller: str, loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        raise UsageError(
            f"{caller} needs a loss_fn(model, batch) that returns a loss of one number, got "
            f"{_given(loss)}. Return what the training calls backward() on. {_WRITE}"
        )
    return loss


def _given(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)} in {loss.dtype}"
    return f"{type(loss).__name__}"


def _name(loss_fn: Any) -> str:
    return str(getattr(loss_fn, "__name__", type(loss_fn).__name__))


def refuse_without_gradient(caller: str, model: nn.Module) -> None:
    """Refuses a loss without a gradient of a model that is trained.

    Args:
        caller: Who is named in errors.
        model: The model.

    Raises:
        UsageError: The model has parameters to train.
    """
    if any(each.requires_grad for each in model.parameters()):
        raise UsageError(
            f"{caller} needs loss_fn to return a loss with a gradient, got one without. Compute it "
            "of what the model returns, without detach(), item() and torch.no_grad()."
        )


def refuse_unused(caller: str, model: nn.Module, called: Collection[Any]) -> None:
    """Refuses a loss that calls parts of a region, of which nothing then runs in low precision.

    Args:
        caller: Who is named in errors.
        model: The model.
        called: The regions in which something ran.

    Raises:
        UsageError: The model is a region in which nothing ran.
    """
    forwards = filter(None, map(forward_of, dict.fromkeys((model, _unwrapped(model)))))
    for region in (each.region for each in forwards):
        if region not in called and not region._automatic:
            raise UsageError(
                f"{caller} needs a loss_fn that calls the model, so that it runs by "
                f"policy={policy_words(region.policy)!r}, got one that calls none or parts of it, "
                "which run in float32. Write model(batch) in it, or pass the part that is called."
            )


def backward(caller: str, loss: Tensor) -> None:
    """Runs the backward pass of a loss.

    Args:
        caller: Who is named in errors.
        loss: The loss.

    Raises:
        UsageError: There was such a pass already.
    """
    try:
        loss.backward()
    except RuntimeError as error:
        if "a second time" not in str(error):
            raise
        raise UsageError(
            f"{caller} needs a loss_fn that leaves the backward pass to it, got one whose graph is "
            "gone. Call the model in it, and return the loss without calling backward()."
        ) from error
