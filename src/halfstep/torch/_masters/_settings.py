"""How masters are kept, as it was asked for."""

from dataclasses import dataclass
from typing import Any

import torch

from halfstep.errors import UsageError
from halfstep.torch._dtypes import COMPUTE, HALF, name_of
from halfstep.torch._masters._step import Feeding


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
    if bucket_bytes is not None and not (isinstance(bucket_bytes, int) and bucket_bytes >= 8):
        raise UsageError(
            f"{function} needs bucket_bytes to be a whole number >= 8, got {bucket_bytes!r}. Leave "
            "it out, or write 2**28 for 256 MiB."
        )
    half = {name: dtype for name, dtype in COMPUTE.items() if dtype in HALF}
    return MasterSettings(
        _checked(function, "param_dtype", param_dtype, half),
        _checked(function, "grad_dtype", grad_dtype, COMPUTE),
        bucket_bytes,
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
