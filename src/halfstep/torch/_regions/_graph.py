"""How a region begins, crosses its boundary and ends: functions that a compiled graph can hold."""

from collections.abc import Callable

from torch import Tensor

from halfstep.torch._regions import _call
from halfstep.torch._regions._boundary import Inward, Outward, cross
from halfstep.torch._regions._call import Call
from halfstep.torch._regions._state import Cells
from halfstep.torch._regions._strays import refuse_strays, strays
from halfstep.torch._regions._tree import is_parameter
from halfstep.torch._tracing import constant, forget_attempts, in_graph, is_tracing, when_abandoned

# Parameters cross together, because each crossing costs a few microseconds, but not too many: their
# gradients also leave together, in memory of their own.
_MOST_TENSORS, _MOST_BYTES = 32, 2**25


@in_graph
def begin(cells: Cells, rule: str) -> None:
    """Begins a call of a region; every `begin` needs its `end`."""
    call = Call(cells, rule)
    _call.push(call)
    when_abandoned(lambda: _abandon(call))


@in_graph
def end() -> None:
    """Ends the innermost call."""
    _call.pop()


@in_graph
def enter(tensors: list[Tensor]) -> list[Tensor]:
    """Returns tensors as the region sees them."""
    entered: dict[int, Tensor] = {}
    for places in _groups(tensors):
        new = cross(Inward, _call.current(), None, [tensors[place] for place in places])
        entered.update(zip(places, new, strict=True))
    inside = [entered[place] for place in range(len(tensors))]
    if is_tracing():
        _call.current().entered += inside
    return inside


def _groups(tensors: list[Tensor]) -> list[list[int]]:
    """Returns which tensors cross together.

    Parameters do. A result crosses alone, because what computed it must not be gone through for
    the sake of others; and so does what has hooks, which expect a gradient when they are called.
    """
    alone: list[list[int]] = []
    groups: list[list[int]] = [[]]
    size = 0
    for place, each in enumerate(tensors):
        if _crosses_alone(each):
            alone.append([place])
            continue
        size += each.nbytes
        if len(groups[-1]) == _MOST_TENSORS or size > _MOST_BYTES:
            groups.append([])
            size = each.nbytes
        groups[-1].append(place)
    return [group for group in groups if group] + alone


def _crosses_alone(tensor: Tensor) -> bool:
    hooked = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    return bool(hooked) or not (is_parameter(tensor) and tensor.is_leaf)


@in_graph
def leave(tensors: list[Tensor]) -> list[Tensor]:
    """Returns tensors as they are seen outside of the region."""
    if is_tracing():
        # Now or never: the graph is not looked at again.
        refuse_strays(strays(tensors, _call.current().entered))
    return list(cross(Outward, _call.current(), None, tensors))


def _abandon(call: Call) -> None:
    """Ends a call, and those inside it, if nobody did."""
    while call in _call.calls():
        _call.pop()


class Capture:
    """Whether the calls of a region fit into one graph; found out when one is captured.

    Args:
        broken: Whether it is known that they do not.

    Example:
        >>> Capture().broken
        False
    """

    def __init__(self, broken: bool = False) -> None:
        self.broken = broken
        self._open = 0
        # Functions without arguments, which a tracer can run in the middle of a capture.
        self.begins, self.ends = constant(lambda: self._begin()), constant(lambda: self._end())

    def _begin(self) -> None:
        self._open += 1
        forget = forget_attempts()
        when_abandoned(lambda: self._abandoned(forget))

    def _end(self) -> None:
        self._open -= 1

    def _abandoned(self, forget: Callable[[], None]) -> None:
        if self._open and not self.broken:
            self.broken = True
            forget()
        self._open = 0
