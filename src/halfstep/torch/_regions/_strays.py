"""Finds what keeps gradients from being true-valued outside of a region.

The gradient of a tensor that the region reads, although it neither is its own nor was passed to it,
leaves without crossing the boundary, with the scale still in it. That of a parameter in half
precision may not fit, and its updates may vanish.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from halfstep.errors import UsageError
from halfstep.torch._dtypes import name_of
from halfstep.torch._masters._kept import without_masters
from halfstep.torch._regions._call import Call

Node = Any


def strays(
    outputs: Iterable[Tensor], entered: Iterable[Tensor], call: Call | None = None
) -> list[Tensor | Node]:
    """Returns the leaves, or nodes of older graphs, that outputs reach past the boundary.

    Args:
        outputs: What the region computed.
        entered: What came in through the boundary.
        call: The call, into which hooks may have let more.

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
        if node in known or _is_inward(node, call):
            continue
        known.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        elif node._sequence_nr() < first:
            found.append(node)
        else:
            waiting += [edge for edge, _ in node.next_functions if edge is not None]
    return found


def _is_inward(node: Node, call: Call | None) -> bool:
    return call is not None and getattr(node, "call", None) is call and not node.outward


def taken_back(outputs: Iterable[Tensor], call: Call) -> list[Node]:
    """Returns where outputs reach what had left the same call: the forward read it again."""
    return [node for node in _nodes(outputs, call) if node.outward]


def is_outside(tensor: Tensor, call: Call) -> bool:
    """Returns whether a tensor was made of nothing but what had left the call."""
    return all(node.outward for node in _nodes([tensor], call))


def _nodes(tensors: Iterable[Tensor], call: Call) -> list[Node]:
    """Returns the first nodes at which tensors reach the boundary of a call."""
    waiting = [each.grad_fn for each in tensors if each.grad_fn is not None]
    seen: set[Node] = set()
    found: list[Node] = []
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "call", None) is call:
            found.append(node)
        else:
            waiting += [edge for edge, _ in node.next_functions if edge is not None]
    return found


def refuse_strays(found: Iterable[Tensor | Node]) -> None:
    """Raises an error for what a region must not read."""
    for stray in found:
        if isinstance(stray, Tensor):
            what = f"a tensor of shape {tuple(stray.shape)} that is neither"
        else:
            what = f"the result of {stray.name()} from outside"
        raise UsageError(
            "A region needs every tensor with a gradient that its forward reads to be a parameter "
            f"or attribute of the model, or an argument, got {what}. Its gradient would be scaled. "
            "Register it with register_parameter(), or pass it as an argument."
        )


class Leaves:
    """Leaves that a region has read and that had not entered.

    One that the forward has made itself is new in each call, and nobody outside asks for its
    gradient. One that comes again is somebody else's.
    """

    def __init__(self) -> None:
        self._seen: list[TensorWeakRef] = []
        self._calls = 0

    def again(self, found: Iterable[Tensor | Node]) -> list[Tensor | Node]:
        """Notes the leaves, and returns what is not a leaf, or is one that comes again."""
        known = [each for ref in self._seen if (each := ref()) is not None]
        leaves = [each for each in found if isinstance(each, Tensor)]
        again = [each for each in leaves if any(each is other for other in known)]
        self._seen = [TensorWeakRef(each) for each in [*known, *leaves]]
        self._calls += bool(leaves)
        return [*again, *(each for each in found if not isinstance(each, Tensor))]

    @property
    def are_own(self) -> bool:
        """Whether so many calls had leaves, new ones each, that the forward must make them."""
        return self._calls > 2


def refuse_half(module: nn.Module) -> None:
    """Raises an error for parameters that cannot hold small updates, or a true-valued gradient."""
    for name, parameter in without_masters(module):
        raise UsageError(
            f"A region needs trained parameters in float32, got {name_of(parameter.dtype)} for "
            f'{name}. Write prepare(..., masters="split"), which keeps small updates beside '
            "the optimizer, or call model.float(): weights are cast where they are used."
        )
