"""Dtypes by name and by object."""

import torch

from halfstep.errors import PolicyError

LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
COMPUTE = {"float32": torch.float32, **LOW}
NAMES = {dtype: name for name, dtype in COMPUTE.items()}


def compute_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a compute dtype's name.

    Args:
        name: `float32`, `bfloat16` or `float16`.

    Example:
        >>> compute_dtype("bfloat16")
        torch.bfloat16
    """
    if name not in COMPUTE:
        raise PolicyError(
            f"halfstep.torch computes in {', '.join(COMPUTE)}, got {name!r}. "
            "Choose one of these as compute_dtype."
        )
    return COMPUTE[name]


def name_of(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the `torch.` in front."""
    return str(dtype).removeprefix("torch.")
