"""The policy that `auto` stands for: measured on a device when something first runs there."""

import functools
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from halfstep.core import (
    AUTO,
    CHOSEN,
    Auto,
    FamilyTimes,
    Machine,
    Plan,
    Policy,
    Race,
    Size,
    is_auto,
    plan_of,
    tell_if_stale,
)
from halfstep.torch._devices import default_device
from halfstep.torch._machine import machine
from halfstep.torch._racing import calls

# Halfway between the sizes that are measured, in numbers that a weight has: of matrices, and of the
# kernels of convolutions.
_LARGE = {2: 2**15, 3: 2**12}


def asked_policy(policy: Policy | Plan | str) -> Policy | Auto:
    """Returns the policy that somebody asks for; one of a plan from elsewhere says so.

    Args:
        policy: A policy, a plan, or the text of either.

    Example:
        >>> print(asked_policy("mixed_bfloat16"), asked_policy("auto"))
        mixed_bfloat16 auto
    """
    if is_auto(policy):
        return AUTO
    plan = plan_of(policy)
    if plan is not None:
        tell_if_stale(plan, machine(plan.machine.device))
    return Policy.of(policy if plan is None else plan)


def settled(
    policy: Policy | Auto, device: torch.device | str, module: nn.Module | None = None
) -> Policy:
    """Returns the policy that is meant, which for `auto` is measured.

    Args:
        policy: The policy.
        device: Where something is to run by it.
        module: What is to run.

    Example:
        >>> print(settled(Policy.named("mixed_bfloat16"), "cpu"))
        mixed_bfloat16
    """
    if isinstance(policy, Policy):
        return policy
    size: Size = "large" if module is None or _is_large(module) else "small"
    where = torch.device(device)
    return _chosen(where if where.type != "meta" else torch.device(device_in_use()), size)


def device_in_use() -> str:
    """Returns the type of device that is computed on, without starting CUDA to know it."""
    started = not torch.cuda.is_available() or torch.cuda.is_initialized()
    return default_device() if started else "cpu"


def _is_large(module: nn.Module) -> bool:
    """Returns whether something in a module is like the large operations that are measured."""
    return any(size >= _LARGE[dimensions] for dimensions, size in _weights(module))


def _weights(module: nn.Module) -> Iterator[tuple[int, int]]:
    for each in module.parameters():
        if not is_lazy(each) and each.dim() >= min(_LARGE):
            yield min(each.dim(), max(_LARGE)), math.prod(each.shape)


def _chosen(device: torch.device, size: Size) -> Policy:
    return CHOSEN.policy(here(device), functools.partial(_measured, device), size)


def here(device: torch.device) -> Machine:
    """Returns where something is measured, and what a user may set that float32 depends on.

    Args:
        device: The device.

    Example:
        >>> here(torch.device("cpu")).versions[-1]
        'float32 highest'
    """
    precision = torch.get_float32_matmul_precision()
    return _machine(device.type, device.index, torch.get_num_threads(), precision)


@functools.lru_cache(maxsize=64)
def _machine(device_type: str, _index: int | None, _threads: int, precision: str) -> Machine:
    found = machine(device_type)
    return replace(found, versions=(*found.versions, f"float32 {precision}"))


def _measured(device: torch.device) -> tuple[FamilyTimes, ...]:
    # In a thread of its own nothing of what the caller is in has a say: no autocast, mode, trace.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_race, device).result()


def _race(device: torch.device) -> tuple[FamilyTimes, ...]:
    if device.type == "cpu":
        return Race(calls(device)).times()
    with device:
        return Race(calls(device), lambda: torch.accelerator.synchronize(device)).times()
