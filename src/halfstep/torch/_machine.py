"""What PyTorch computes on."""

import torch

from halfstep import __version__
from halfstep.core import Machine, Plan, Policy, plan_of, processor, tell_if_stale
from halfstep.torch._devices import is_there


def machine(device_type: str) -> Machine:
    """Returns what a plan says of where it is made.

    Args:
        device_type: Such as "cpu"; one that is not there gives the processor.

    Example:
        >>> machine("cpu").device
        'cpu'
    """
    versions = (f"halfstep {__version__}", f"torch {torch.__version__}")
    if device_type == "cpu" or not is_there(device_type):
        return Machine("cpu", processor(), torch.get_num_threads(), versions)
    module = torch.get_device_module(device_type)
    name = module.get_device_name() if hasattr(module, "get_device_name") else device_type
    return Machine(device_type, name, 0, versions)


def asked_policy(policy: Policy | Plan | str) -> Policy:
    """Returns the policy that somebody asks for; one of a plan from elsewhere says so.

    Args:
        policy: A policy, a plan, or the text of either.
    """
    plan = plan_of(policy)
    if plan is not None:
        tell_if_stale(plan, machine(plan.machine.device))
    return Policy.of(policy if plan is None else plan)
