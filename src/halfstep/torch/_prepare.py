"""Makes a model a region: one line."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfstep.core import Plan, Policy, emit, listening
from halfstep.errors import UsageError
from halfstep.torch._observing._diagnosis import widening
from halfstep.torch._observing._step import Case
from halfstep.torch._region import Region
from halfstep.torch._regions._attach import (
    checked_masters,
    checked_module,
    checked_optimizers,
    checked_policy,
)
from halfstep.torch._regions._forward import Forward, device_of, forward_of, own_modules
from halfstep.torch._regions._repeated import Repeated, made_again
from halfstep.torch._regions._state import fresh
from halfstep.torch._regions._strays import refuse_half
from halfstep.torch._regions._widening import Skipping, Widening


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    policy: Policy | Plan | str = "mixed_float16",
    *,
    masters: str = "cast",
    grad_dtype: str | None = None,
    bucket_bytes: int | None = None,
    release: bool = False,
    on_overflow: str = "skip",
) -> Region:
    """Makes a model train in mixed precision, in place; the training loop stays as it is.

    Inside the model, operations run in the precision that the policy's rules choose, and gradients
    are scaled so that small ones survive. Outside, everything has its true value: outputs, the
    gradients of parameters and inputs, what hooks see, what is accumulated or clipped. The model
    stays what it was: its class, attributes, hooks and state dict do not change.

    Args:
        model: The model, or a part of one, before or after `torch.compile`. A part that was
            prepared by itself keeps its own policy.
        optimizer: One or several optimizers that train it. They then skip a step whose gradients
            are not finite, and leave parameters, state and step counts as they were.
        policy: The policy, or its text; or a plan, or the path of its file. `auto` is what the
            device is fast in that the model is on, which is measured if it is not known yet.
        masters: Where float32 masters are. `cast`: parameters stay in float32, and are cast where
            they are used. `split`: parameters become the policy's `param_dtype`, bfloat16 where it
            is float32, and the bits that they lack are kept beside the optimizer, exactly.
        grad_dtype: With `split`, what gradients are kept in; see `keep_masters`.
        bucket_bytes: With `split`, how much float32 there may be in a step; see `keep_masters`.
        release: Whether gradients are applied, and freed, as soon as backward has left the model,
            which is then a part of what the optimizer trains. All of its parameters are stepped, or
            none. `optimizer.step()` does the rest, and comes after each backward; see `accumulate`.
        on_overflow: `skip` leaves it at skipped steps and a lower scale. `widen` also looks into
            what overflows on and on although the scale is low, and lets that operation run in
            float32 from then on, with a warning; see `Region.widened`.

    Returns:
        What tells about scale and steps, is saved with a checkpoint, and undoes it all.

    Raises:
        UsageError: The model is not a module, is a region already or trains parameters in half
            precision; an optimizer is none, or trains nothing in the model, or is missing to widen.
        PolicyError: The policy cannot be read or followed.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> region = prepare(model, optimizer, policy="mixed_bfloat16")
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     loss = model(torch.ones(2, 4)).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        >>> region.history
        3 steps, 0 skipped, 0 of them in a row up to now
    """
    module = checked_module(model)
    before = forward_of(module)
    if before is not None and before.region._automatic:
        # Nobody asked for that one in particular.
        before.region.remove()
    elif before is not None:
        raise UsageError(
            f"prepare needs a model that is not prepared yet, got {type(module).__name__}, which "
            "is. Call remove() on what prepare returned first, or attach() to add an optimizer."
        )
    optimizers = checked_optimizers(optimizer, module)
    chosen = checked_policy(policy, module)
    settings = checked_masters(masters, chosen, grad_dtype, bucket_bytes)
    handler = checked_handler(on_overflow, optimizers, release=release)
    region = Region(module, chosen, fresh(chosen.scale.init(), device_of(module)), handler)
    if settings is None:
        refuse_half(module)
    else:
        region._keep_masters(own_modules(module), settings)
    module.forward = Forward(region, module, module.__dict__.get("forward"))
    if listening():
        emit("region", policy=str(chosen))
    if release:
        region._releases = []
    try:
        region.attach(optimizers)
    except UsageError:
        region.remove()
        raise
    return region


def checked_handler(
    on_overflow: Any, optimizers: Sequence[Optimizer], *, release: bool
) -> Skipping:
    """Returns what handles the overflows of a region."""
    if on_overflow not in ("skip", "widen"):
        raise UsageError(
            f"prepare needs on_overflow to be 'skip' or 'widen', got {on_overflow!r}. 'skip' leaves"
            " out steps that overflow, 'widen' also finds what overflows on and on."
        )
    if on_overflow == "skip":
        return Skipping()
    if release:
        raise UsageError(
            "prepare needs on_overflow='skip' with release=True, got 'widen', which goes through a "
            "step once more, when its gradients are gone. Leave one of them out."
        )
    if not optimizers:
        raise UsageError(
            "prepare needs an optimizer with on_overflow='widen', got none: what overflows on and "
            "on shows in the steps that it skips. Write prepare(model, optimizer, "
            "on_overflow='widen'), and attach() others later."
        )
    return Widening(_search)


def _search(module: nn.Module, calls: list[Repeated], factor: float) -> Any:
    forward = forward_of(module)
    regions = [forward.region] if forward else []
    return widening(Case(module, calls, made_again, settles=False).scaled(regions, factor))
