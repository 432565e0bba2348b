"""What PyTorch computes on."""

import torch

from halfstep import __version__
from halfstep.core import Machine, processor
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
