"""Gradients that are applied within backward, which no scaled loss may lead to."""

import weakref
from typing import Any

from torch import Tensor

from halfstep.errors import UsageError
from halfstep.torch._private import backward_pass

# What applies gradients within backward.
released: "weakref.WeakSet[Any]" = weakref.WeakSet()
# The latest backward passes that began from a scaled loss.
_scaled: list[int] = []
_KEPT = 64


def note_scaled(outputs: Tensor) -> None:
    """Lets backward passes from scaled outputs be known as such."""
    if released and outputs.requires_grad:
        outputs.register_hook(_note)


def _note(_gradient: Tensor) -> None:
    _scaled[:] = [*_scaled[-_KEPT:], backward_pass()]


def refuse_scaled() -> None:
    """Raises an error if the gradients of the present backward pass are scaled."""
    if backward_pass() in _scaled:
        raise UsageError(
            "GradScaler needs gradients that wait for step(), got a region with release=True: it "
            "would apply them while they are scaled, and before it is known that none overflows. "
            "Leave the scaler out, as a region scales by itself, or use release=False."
        )
