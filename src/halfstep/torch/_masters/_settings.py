"""How masters are kept, as it was asked for."""

from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import UsageError
from halfstep.torch._dtypes import COMPUTE, HALF, name_of
from halfstep.torch._masters._feeding import Feeding

# What a master and a gradient of the 16 numbers take that the vectors of a CPU hold at most.
# What a kernel does one by one, after the last whole vector, it rounds in another way.
_LEAST_BYTES = 128


@dataclass(frozen=True)
class MasterSettings:
    """How masters are kept.

    Args:
        param_dtype: What parameters in float32 become, None for nothing else.
        grad_dtype: What gradients are kept in, None for what suits the parameter.
        bucket_bytes: How many bytes of float32 there may be at a time, None for the default.
    """

    param_dtype: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    bucket_bytes: int | None = None

    def feeding(self) -> Feeding:
        """Returns how an optimizer is fed."""
        return Feeding(self.bucket_bytes)


def checked_settings(
    function: str, *, param_dtype: Any, grad_dtype: Any, bucket_bytes: Any
) -> MasterSettings:
    """Returns the settings, if they make sense."""
    _check_bucket(function, bucket_bytes)
    _refuse_float16(function, grad_dtype)
    half = {name: dtype for name, dtype in COMPUTE.items() if dtype in HALF}
    wide = {name: dtype for name, dtype in COMPUTE.items() if dtype is not torch.float16}
    return MasterSettings(
        _checked(function, "param_dtype", param_dtype, half),
        _checked(function, "grad_dtype", grad_dtype, wide),
        bucket_bytes,
    )


def _check_bucket(function: str, given: Any) -> None:
    if given is None or (isinstance(given, int) and given >= _LEAST_BYTES):
        return
    raise UsageError(
        f"{function} needs bucket_bytes to be a whole number >= {_LEAST_BYTES}, got {given!r}. "
        "Leave it out, or write 2**28 for 256 MiB."
    )


def _refuse_float16(function: str, grad_dtype: Any) -> None:
    """Refuses what only scaled gradients fit into, since those that a step uses are not scaled."""
    if grad_dtype not in ("float16", torch.float16):
        return
    raise UsageError(
        f"{function} needs grad_dtype to be float32 or bfloat16, got 'float16', in which "
        "gradients of their true size overflow, so that steps are skipped, or round to 0. "
        "Write grad_dtype='float32'."
    )


def _checked(
    function: str, argument: str, given: Any, choices: dict[str, torch.dtype]
) -> torch.dtype | None:
    if given is None or given in choices.values():
        return given
    if not isinstance(given, str) or given not in choices:
        shown = name_of(given) if isinstance(given, torch.dtype) else given
        raise UsageError(
            f"{function} needs {argument} to be {' or '.join(choices)}, got {shown!r}. Leave it "
            "out for the default."
        )
    return choices[given]
