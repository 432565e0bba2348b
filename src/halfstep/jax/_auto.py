"""The policy that `auto` stands for: measured on the device when something first runs there."""

import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from halfstep import __version__
from halfstep.core import (
    AUTO,
    CHOSEN,
    Auto,
    FamilyTimes,
    Machine,
    Policy,
    Race,
    begun,
    is_auto,
    processor,
)
from halfstep.jax._racing import calls

_config: Any = jax.config


def asked_policy(policy: Policy | str) -> Policy | Auto:
    """Returns the policy that somebody asks for.

    Args:
        policy: A policy, a plan, or the text of either.

    Example:
        >>> print(asked_policy("mixed_bfloat16"), asked_policy("auto"))
        mixed_bfloat16 auto
    """
    return AUTO if is_auto(policy) else Policy.of(policy)


def settled(policy: Policy | Auto) -> Policy:
    """Returns the policy that is meant, which for `auto` is measured.

    Args:
        policy: The policy.

    Example:
        >>> print(settled(Policy.named("mixed_bfloat16")))
        mixed_bfloat16
    """
    if isinstance(policy, Policy):
        return policy
    device = _device()
    return CHOSEN.policy(machine(device), functools.partial(_measured, device))


def machine(device: Any) -> Machine:
    """Returns where something is measured.

    Args:
        device: A device of JAX.

    Example:
        >>> machine(jax.devices("cpu")[0]).device
        'cpu'
    """
    precision = _config.jax_default_matmul_precision or "default"
    versions = (f"halfstep {__version__}", f"jax {jax.__version__}", f"float32 {precision}")
    if device.platform == "cpu":
        return Machine("cpu", processor(), os.cpu_count() or 1, versions)
    return Machine(str(device.platform), str(device.device_kind), 0, versions)


def _device() -> Any:
    asked = _config.jax_default_device
    if isinstance(asked, str):  # the name of a platform
        return jax.devices(asked)[0]
    return jax.devices()[0] if asked is None else asked


def _measured(device: Any) -> tuple[FamilyTimes, ...]:
    # In a thread of its own there is nothing that would trace instead of run it.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: Race(begun(calls(device))).times()).result()
