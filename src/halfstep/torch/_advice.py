"""Advice in the error of a custom function that was not made for autocast.

Its backward runs outside of the region and meets tensors of two dtypes. PyTorch's message names two
matrices; what helps is to name the decorators.
"""

import functools
from typing import Any

from torch.autograd.function import BackwardCFunction

_SIGNS = ("same dtype", "scalar type", "dtype mismatch", "to have the same type")


def install() -> None:
    """Puts the advice into the errors of undecorated custom functions, once."""
    original = BackwardCFunction.apply
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def apply(self: Any, *gradients: Any) -> Any:
        try:
            return original(self, *gradients)
        except RuntimeError as error:
            backward = getattr(self, "_forward_cls").backward  # noqa: B009
            if hasattr(backward, "__wrapped__") or not any(sign in str(error) for sign in _SIGNS):
                raise
            raise type(error)(
                f"{error}\nThis happened in {backward.__qualname__}. If its forward ran inside "
                "autocast, decorate forward with halfstep.torch.custom_fwd and backward with "
                "halfstep.torch.custom_bwd, so that both see the same dtypes."
            ) from error

    BackwardCFunction.apply = apply  # type: ignore[method-assign]
