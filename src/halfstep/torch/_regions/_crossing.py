"""Carries whatever nesting of tensors into a region and out of it."""

from typing import Any

import torch
from torch import Tensor

from halfstep.torch._regions import _graph
from halfstep.torch._regions._tree import cast_tensor, tensors_in, with_tensors


def entered(value: Any) -> Any:
    """Returns a nesting of tensors as the region sees it."""
    tensors = tensors_in(value)
    crossing = [each for each in tensors if each.requires_grad]
    if not crossing:
        return value
    inside = iter(_graph.enter(crossing))
    return with_tensors(value, [next(inside) if each.requires_grad else each for each in tensors])


def left(value: Any, dtype: torch.dtype) -> Any:
    """Returns a nesting of tensors as it is seen outside of the region, floats in a dtype."""
    tensors = tensors_in(value)
    crossing = [_copied(each, dtype) for each in tensors if each.requires_grad]
    outside = iter(_graph.leave(crossing) if crossing else ())
    rest = [next(outside) if each.requires_grad else cast_tensor(each, dtype) for each in tensors]
    return with_tensors(value, rest)


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a copy: what is inside must not change when somebody writes to what is outside."""
    changed = cast_tensor(tensor, dtype)
    return changed.clone() if changed is tensor else changed
