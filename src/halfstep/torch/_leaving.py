"""Which gradients leave a part of a graph, whoever else adds to them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from halfstep.torch._observing._sizes import is_finite

_Edge = tuple[Any, int]


def watch_leaving(given: list[Tensor], made: list[Tensor], finite: list[Tensor]) -> None:
    """Collects, as backward passes run, whether the gradients that leave a part are finite.

    Args:
        given: What the part was computed of.
        made: What was computed.
        finite: Where an answer is put for each gradient, on its device.

    Example:
        >>> import torch
        >>> before, finite = torch.zeros(1, requires_grad=True), []
        >>> watch_leaving([before], [before.sqrt()], finite)
        >>> after = before.sqrt()
        >>> watch_leaving([before], [after], finite)
        >>> (after + before).sum().backward()
        >>> finite
        [tensor(False)]
    """
    # Of a sparse leaf PyTorch knows no edge.
    known = [each for each in given if each.grad_fn is not None or each.layout is torch.strided]
    found = [get_gradient_edge(each) for each in known if each.requires_grad]
    edges = {(each.node, each.output_nr) for each in found}
    for node, leaving in _crossing(edges, made) if edges else ():
        node.register_hook(_receiver(leaving, finite))


def _crossing(edges: set[_Edge], made: list[Tensor]) -> Iterator[tuple[Any, list[int]]]:
    """Yields each node with an edge to what came before the part, and the places of those."""
    before = {node for node, _ in edges}
    waiting, seen = [each.grad_fn for each in made], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in before:
            continue
        seen.add(node)
        leaving = [place for place, edge in enumerate(node.next_functions) if edge in edges]
        if leaving:
            yield node, leaving
        waiting += [each for each, _ in node.next_functions]


def _receiver(leaving: list[int], finite: list[Tensor]) -> Callable[[Any, Any], None]:
    def receive(inputs: Any, _outputs: Any) -> None:
        found = [inputs[place] for place in leaving]
        finite.extend(is_finite(each) for each in found if each is not None)

    return receive
