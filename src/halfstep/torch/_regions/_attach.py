"""Checks what `prepare` is given."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.core import Auto, Plan, Policy, overriding_policy
from halfstep.errors import PolicyError, UsageError
from halfstep.torch._auto import asked_policy, settled
from halfstep.torch._dtypes import compute_dtype
from halfstep.torch._masters._settings import MasterSettings, checked_settings
from halfstep.torch._regions._forward import device_of
from halfstep.torch._scaling._gradients import parameters_of


def followed(policy: Policy | Plan | str) -> Policy | Auto:
    """Returns the policy that counts where somebody asks for one.

    One that wins over what a script asks for leaves islands of full precision alone.
    """
    asked = asked_policy(policy)
    is_island = isinstance(asked, Policy) and asked.compute_dtype == "float32"
    return asked if is_island else overriding_policy() or asked


def checked_policy(policy: Policy | Plan | str, module: nn.Module) -> Policy:
    """Returns the policy that the region of a module follows, if it can."""
    return runnable(settled(followed(policy), device_of(module), module))


def runnable(policy: Policy) -> Policy:
    """Returns a policy if PyTorch can run by it."""
    compute_dtype(policy.compute_dtype)
    compute_dtype(policy.output_dtype)
    return policy


def checked_masters(
    masters: Any, policy: Policy, grad_dtype: Any, bucket_bytes: Any
) -> MasterSettings | None:
    """Returns how masters are kept beside half-precision parameters, None for float32 ones."""
    if masters not in ("cast", "split"):
        raise UsageError(
            f"prepare needs masters to be 'cast' or 'split', got {masters!r}. 'cast' keeps "
            "parameters in float32, 'split' in half precision with the missing bits beside them."
        )
    if masters == "cast":
        _refuse_half_storage(policy, grad_dtype, bucket_bytes)
        return None
    if policy.compute_dtype == "float32":
        if overriding_policy() is not None:
            # The reference of a comparison, in which nothing is half.
            return None
        raise PolicyError(
            f"masters='split' needs a compute_dtype of 16 bits, got policy {str(policy)!r}. Write "
            "policy='mixed_bfloat16', or masters='cast'."
        )
    half = policy.param_dtype if policy.param_dtype != "float32" else "bfloat16"
    return checked_settings(
        "prepare", param_dtype=half, grad_dtype=grad_dtype, bucket_bytes=bucket_bytes
    )


def _refuse_half_storage(policy: Policy, grad_dtype: Any, bucket_bytes: Any) -> None:
    if policy.param_dtype != "float32":
        raise PolicyError(
            f"prepare needs param_dtype=float32, got {policy.param_dtype!r}. Leave it out: weights "
            "stay in float32 and are cast where they are used; or write masters='split', which "
            "keeps them in half precision, with exact float32 masters."
        )
    given = {"grad_dtype": grad_dtype, "bucket_bytes": bucket_bytes}
    for name, value in given.items():
        if value is not None:
            raise UsageError(
                f"prepare needs masters='split' for {name}, got {name}={value!r} alone. Write "
                f"masters='split', or leave {name} out."
            )


def checked_module(model: Any) -> nn.Module:
    """Returns the module to be prepared: of a compiled one, the one inside."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"prepare needs a torch.nn.Module, got {type(model).__name__}. Pass the model, not its "
            "class, its parameters or a function."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "prepare needs a module whose forward is Python, got a torch.jit.ScriptModule. Prepare "
            "the model that it was made from."
        )
    inner = uncompiled(model)
    return model if inner is model else checked_module(inner)


def uncompiled(module: nn.Module) -> Any:
    """Returns the module that `torch.compile` wrapped in this one, or this one."""
    return module.__dict__.get("_modules", {}).get("_orig_mod", module)


def checked_optimizers(optimizer: Any, module: nn.Module) -> list[Optimizer]:
    """Returns the optimizers, each of which trains a parameter of the module."""
    if optimizer is None:
        return []
    several = isinstance(optimizer, Iterable) and not isinstance(optimizer, Optimizer)
    found = list(optimizer) if several else [optimizer]
    own = {id(parameter) for parameter in module.parameters()}
    for each in found:
        if not isinstance(each, Optimizer):
            raise UsageError(
                f"prepare needs a torch.optim.Optimizer, or a list of them, got "
                f"{type(each).__name__}. Pass the optimizer that trains the model."
            )
        if own.isdisjoint(map(id, parameters_of(each))):
            raise UsageError(
                f"prepare needs an optimizer that trains the model, got {type(each).__name__} "
                "without any parameter in it. Pass the one made from model.parameters()."
            )
    return found
