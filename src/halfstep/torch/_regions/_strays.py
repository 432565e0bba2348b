"""Finds tensors that a region reads although they neither are its own nor were passed to it.

Their gradients would leave the region without passing its boundary, with the scale still in them.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from halfstep.errors import UsageError

Node = Any


def strays(outputs: Iterable[Tensor], entered: Iterable[Tensor]) -> list[Tensor | Node]:
    """Returns the leaves, or nodes of older graphs, that outputs reach past the boundary.

    Args:
        outputs: What the region computed.
        entered: What came in through the boundary.

    Example:
        >>> import torch
        >>> inside, stray = torch.ones(1, requires_grad=True) * 1, torch.ones(1, requires_grad=True)
        >>> strays([inside * stray], [inside])[0] is stray
        True
    """
    known = {each.grad_fn for each in entered}
    first = min((node._sequence_nr() for node in known if node is not None), default=0)
    waiting = [each.grad_fn for each in outputs if each.grad_fn is not None]
    found: list[Tensor | Node] = [each for each in outputs if each.is_leaf and each.requires_grad]
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        elif node._sequence_nr() < first:
            found.append(node)
        else:
            waiting += [edge for edge, _ in node.next_functions if edge is not None]
    return found


def refuse(stray: Tensor | Node) -> None:
    """Raises an error for what a region must not read."""
    if isinstance(stray, Tensor):
        what = f"a tensor of shape {tuple(stray.shape)} that is neither"
    else:
        what = f"the result of {stray.name()} from outside"
    raise UsageError(
        "A region needs every tensor with a gradient that its forward reads to be a parameter or "
        f"attribute of the model, or an argument, got {what}. Its gradient would be scaled. "
        "Register it with register_parameter(), or pass it as an argument."
    )
