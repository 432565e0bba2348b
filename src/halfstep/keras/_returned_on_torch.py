"""Gradients that come back to outputs on PyTorch, which calls hooks of tensors."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from halfstep.keras._patches import Undo
from halfstep.keras._returned import Returned, local, replaced


def install() -> Iterator[Undo]:
    """Yields nothing: there is nothing to change."""
    yield from ()


def watched(outputs: Any, returned: Returned) -> Any:
    """Returns outputs whose gradients are handed on when they arrive."""
    return replaced(outputs, functools.partial(_watched, returned))


def _watched(returned: Returned, place: int, value: Any) -> Any:
    # In a step that is run again the variables are plain numbers.
    if local.again and torch.is_grad_enabled() and not value.requires_grad:
        value = value.detach().requires_grad_()
    if value.requires_grad:
        value.register_hook(lambda grad: returned.take(place, grad.detach().clone()))
    return value
