"""Checks what `prepare` is given."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.core import Policy, overriding_policy
from halfstep.errors import PolicyError, UsageError
from halfstep.torch._dtypes import compute_dtype
from halfstep.torch._scaling._gradients import parameters_of


def checked_policy(policy: Policy | str) -> Policy:
    """Returns the policy that a region follows, if it can.

    One that wins over what a script asks for leaves islands of full precision alone.
    """
    asked = Policy.of(policy)
    chosen = asked if asked.compute_dtype == "float32" else overriding_policy() or asked
    compute_dtype(chosen.compute_dtype)
    compute_dtype(chosen.output_dtype)
    if chosen.param_dtype != "float32":
        raise PolicyError(
            f"prepare needs param_dtype=float32, got {chosen.param_dtype!r}. Leave it out: weights "
            "stay in float32 and are cast where they are used."
        )
    return chosen


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
