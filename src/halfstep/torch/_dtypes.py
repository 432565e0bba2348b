"""Dtypes by name and by object."""

import torch

from halfstep.errors import PolicyError

COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = (torch.bfloat16, torch.float16)


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


def checked(dtype: object) -> torch.dtype:
    """Returns a dtype if operations can run in it.

    Example:
        >>> checked(torch.float16)
        torch.float16
    """
    if not isinstance(dtype, torch.dtype) or dtype not in COMPUTE.values():
        remedy = f"Write torch.{dtype}." if dtype in COMPUTE else "Other dtypes are never cast."
        raise PolicyError(
            f"autocast needs dtype= one of {', '.join(map(str, COMPUTE.values()))}, got {dtype!r}. "
            f"{remedy}"
        )
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Returns a dtype's name without the `torch.` in front."""
    return str(dtype).removeprefix("torch.")


def format_of(dtype: torch.dtype) -> str:
    """Returns the name of the format that the numbers of a dtype are in.

    Example:
        >>> format_of(torch.complex64), format_of(torch.float16)
        ('float32', 'float16')
    """
    return name_of(dtype.to_real() if dtype.is_complex else dtype)
