"""Through which lists and states an optimizer sees its parameters."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.torch._once import once, without


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Returns an optimizer and those that it holds, such as the one that a wrapper steps.

    Example:
        >>> import torch
        >>> inner = torch.optim.SGD([torch.ones(1)])
        >>> outer = torch.optim.SGD([torch.ones(1)])
        >>> outer.base_optimizer = inner
        >>> optimizers_in(outer) == [outer, inner]
        True
    """
    found = [optimizer]
    for one in found:
        held = getattr(one, "__dict__", {}).values()
        found += without(once(each for each in held if isinstance(each, Optimizer)), found)
    return found


class Views:
    """The lists and states in which an optimizer, and those that it holds, have parameters.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        optimizers = optimizers_in(optimizer)
        self.states: list[MutableMapping[Tensor, Any]] = once(each.state for each in optimizers)
        self._lists = [(each, [*each]) for each in once(chain(*map(_lists, optimizers)))]

    def show(self, seen: Mapping[int, Sequence[Tensor]]) -> None:
        """Shows other tensors in the place of parameters, by number, and none for what is left."""
        for shown, full in self._lists:
            shown[:] = [each for one in full for each in _seen(one, seen)]

    def restore(self) -> None:
        """Shows the parameters again."""
        for shown, full in self._lists:
            shown[:] = full

    def move_state(self, source: Tensor, target: Tensor) -> None:
        """Puts the state of one tensor to another."""
        for state in self.states:
            if source in state:
                state[target] = state.pop(source)


def _seen(one: Any, seen: Mapping[int, Sequence[Tensor]]) -> Sequence[Any]:
    return seen.get(id(one), ()) if isinstance(one, Tensor) else [one]


def _lists(optimizer: Optimizer) -> Iterator[list[Any]]:
    """Yields the groups' lists, and any other in which an optimizer has parameters of its own."""
    yield from (group["params"] for group in optimizer.param_groups)
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for value in getattr(optimizer, "__dict__", {}).values():
        if isinstance(value, list) and any(id(each) in trained for each in value):
            yield value
