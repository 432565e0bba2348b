"""Runs a step of a copy of a model, of which nothing is left behind."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from halfstep.core import Policy, quiet
from halfstep.errors import UsageError
from halfstep.torch._dtypes import HALF
from halfstep.torch._master import keep_masters
from halfstep.torch._masters._convert import to_float32
from halfstep.torch._masters._feeding import feeding_of
from halfstep.torch._observing._losses import backward, loss_of, refuse_without_gradient
from halfstep.torch._once import without
from halfstep.torch._prepare import prepare
from halfstep.torch._private import convert
from halfstep.torch._regions._attach import checked_module, uncompiled
from halfstep.torch._regions._forward import forward_of

LossFn = Callable[[nn.Module, Any], Tensor]
Twin = tuple[nn.Module, Optimizer | None]


def twin(model: nn.Module, optimizer: Optimizer | None = None) -> Twin:
    """Returns copies of a model, prepared as it is, and of an optimizer that trains it."""
    again, stepper = _copies(model, optimizer)
    if optimizer is None or stepper is None:
        return again, stepper
    for old, new in zip(_bare(model).modules(), again.modules(), strict=True):
        before, after = forward_of(old), forward_of(new)
        if before and after and optimizer in [*before.region._attached()]:
            after.region.attach(stepper)
    if feeding_of(optimizer) is not None and feeding_of(stepper) is None:
        keep_masters(stepper)
    return again, stepper


def prepared_twin(
    model: nn.Module, policy: Policy | str, optimizer: Optimizer | None = None
) -> Twin:
    """Returns copies, of which the model has its parameters in float32 and follows a policy."""
    again, stepper = _copies(model, optimizer)
    for module in again.modules():
        if forward := forward_of(module):
            forward.region.remove()
    for parameter in again.parameters():
        to_float32(parameter)
    convert(again, _widened)
    for state in stepper.state.values() if stepper else ():
        state.update({name: _widened(value) for name, value in state.items()})
    with quiet("region"):
        prepare(again, stepper, policy)
    return again, stepper


def _copies(model: nn.Module, optimizer: Optimizer | None) -> Twin:
    whole = _bare(model)
    try:
        return copy.deepcopy((whole, optimizer))
    except Exception as error:
        raise UsageError(
            f"ranges needs a model that can be copied, got {type(whole).__name__}: {error}. Detach "
            "the tensors that it keeps as attributes, or pass a model that was just built."
        ) from error


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF else value


def _bare(model: nn.Module) -> nn.Module:
    """Returns the module without what runs it elsewhere or compiled."""
    inner = checked_module(model)
    while isinstance(inner, (DataParallel, DistributedDataParallel)):
        inner = uncompiled(inner.module)
    return inner


def run_step(model: nn.Module, batch: Any, loss_fn: LossFn) -> None:
    """Runs a model forward and backward; only its parameters have gradients afterwards."""
    trained = [each for each in model.parameters() if each.requires_grad]
    if not trained:
        raise UsageError(
            f"ranges needs a model with parameters to train, got {type(model).__name__} without "
            "any that requires a gradient. Pass the model that is trained."
        )
    with _as_before(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        loss = loss_of("ranges", loss_fn, model, batch)
        if not loss.requires_grad:
            refuse_without_gradient("ranges", model)
        with _without_gradients(without(_leaves(loss), trained)):
            backward("ranges", loss)
    if all(each.grad is None for each in trained):
        raise UsageError(
            "ranges needs a loss of the model that loss_fn is given, got one of something else. "
            "Write loss_fn=lambda model, batch: ... with that model."
        )


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Puts every generator of random numbers back to where it was."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    plain, legacy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(legacy)


def _leaves(loss: Tensor) -> list[Tensor]:
    """Returns what a loss has a gradient with respect to."""
    waiting, seen, found = [loss.grad_fn], set[Any](), list[Tensor]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
            found += [node.variable] if hasattr(node, "variable") else []
    return found


@contextlib.contextmanager
def _without_gradients(tensors: list[Tensor]) -> Iterator[None]:
    """Lets tensors have the gradients again that they have now."""
    before = [each.grad for each in tensors]
    for each in tensors:
        each.grad = None
    try:
        yield
    finally:
        for each, gradient in zip(tensors, before, strict=True):
            each.grad = gradient
