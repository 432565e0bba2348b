"""Which device a region is for, and which dtype it computes in unless told otherwise."""

import torch

from halfstep.errors import UsageError
from halfstep.torch import _private


def default_device() -> str:
    """Returns the type of the accelerator in use, or `cpu` where there is none.

    Example:
        >>> default_device() in ("cpu", "cuda", "mps", "xpu")
        True
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def check_device(device_type: object, *, enabled: bool) -> str:
    """Returns the device type if a region can run on it.

    Raises:
        UsageError: It is not a string such as "cuda", or this machine has no such device.
    """
    if callable(device_type):
        raise UsageError(
            f"autocast needs parentheses to decorate {device_type!r}. Write @autocast()."
        )
    if not isinstance(device_type, str):
        raise UsageError(
            f"autocast needs a device type such as 'cuda' or 'cpu', got {device_type!r}. "
            "Write autocast(tensor.device.type)."
        )
    if device_type not in _private.autocast_devices():
        raise UsageError(
            f"autocast needs a device type that PyTorch can autocast, got {device_type!r}. "
            f"Write one of {', '.join(_private.autocast_devices())}."
        )
    if enabled and not is_there(device_type):
        raise UsageError(
            f"autocast({device_type!r}) needs such a device, and PyTorch sees none. Write "
            "autocast() for the device at hand, autocast('cpu'), or enabled=False."
        )
    return device_type


def is_there(device_type: str) -> bool:
    """Returns whether this machine has a device of that type.

    Example:
        >>> is_there("cpu")
        True
    """
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except (AttributeError, RuntimeError):
        return False
