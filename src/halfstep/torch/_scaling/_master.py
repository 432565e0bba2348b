"""Float32 masters for float16 parameters, for the time in which the optimizer steps."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.torch._masters._kept import master_of
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._loading import keep_wide, warn_of_narrow
from halfstep.torch._scaling._optimizers import PerOptimizer

_LARGEST = torch.finfo(torch.float16).max


def has_half(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer trains a float16 parameter that has no master yet."""
    groups = optimizer.param_groups
    half = [each for group in groups for each in group["params"] if each.dtype is torch.float16]
    return any(master_of(each) is None for each in half)


class Masters:
    """Remembers a float32 copy of each float16 parameter between steps, and keeps none alive.

    Example:
        >>> parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
        >>> optimizer = torch.optim.SGD([parameter], lr=2.0**-13)
        >>> parameter.grad_dtype = torch.float32
        >>> parameter.grad = -torch.ones(1)
        >>> masters = Masters()
        >>> for _ in range(8):
        ...     with masters.step(optimizer):
        ...         _ = optimizer.step()
        >>> parameter.item() - 1.0 == 8 * 2.0**-13
        True
    """

    def __init__(self) -> None:
        self._copies = WeakTensorKeyDictionary()
        self._seen: PerOptimizer[bool] = PerOptimizer()

    def __reduce__(self) -> tuple[Any, ...]:
        # A master belongs to a parameter of this process; a copy starts from the parameters again.
        return Masters, ()

    def step(self, optimizer: Optimizer) -> contextlib.AbstractContextManager["Swap"]:
        """Lets the optimizer see the masters instead of the float16 parameters."""
        if self._seen.get(optimizer) is None:
            self._seen[optimizer] = True
            warn_of_narrow(optimizer)
            keep_wide(optimizer)
        return self._swapped(optimizer)

    @contextlib.contextmanager
    def _swapped(self, optimizer: Optimizer) -> Iterator["Swap"]:
        swap = Swap(optimizer, self)
        swap.enter()
        try:
            yield swap
        finally:
            swap.leave()

    def kept(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the masters that exist for an optimizer's parameters."""
        found = (self._copies.get(parameter) for parameter in parameters_of(optimizer))
        return [master for master in found if master is not None]

    def of(self, parameter: Tensor) -> Tensor:
        """Returns the master of a parameter, following whatever else changed the parameter."""
        with torch.no_grad():
            master = self._copies.get(parameter)
            if master is None or master.shape != parameter.shape:
                master = torch.nn.Parameter(parameter.detach().float())
            else:
                kept = rounded(master) == parameter
                master.copy_(torch.where(kept, master, parameter.float()))
            self._copies[parameter] = master
        return master


def rounded(master: Tensor) -> Tensor:
    """Returns a master as float16, the largest finite value in place of an overflow."""
    return master.clamp(-_LARGEST, _LARGEST).half()


class Swap:
    """The exchange of parameters and masters in one optimizer; it can be undone and redone.

    Args:
        optimizer: The optimizer, whose groups and state are rewritten in place.
        masters: Where masters come from.
    """

    def __init__(self, optimizer: Optimizer, masters: Masters) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def enter(self) -> None:
        """Puts the masters, with the gradients of their parameters, into the optimizer."""
        for group in self._optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if parameter.dtype is torch.float16 and parameter.grad is not None:
                    master = self._masters.of(parameter)
                    master.grad = parameter.grad.float()
                    group["params"][place] = master
                    self._pairs.append((parameter, master))
        self._move_state()

    def leave(self) -> None:
        """Puts the parameters back, with what the optimizer made of their masters."""
        back = {id(master): parameter for parameter, master in self._pairs}
        for group in self._optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                group["params"][place] = back.get(id(parameter), parameter)
        self._pairs = [(master, parameter) for parameter, master in self._pairs]
        self._move_state()
        with torch.no_grad():
            for master, parameter in self._pairs:
                parameter.copy_(rounded(master))
                master.grad = None
        self._pairs = []

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Shows the parameters again for as long as a closure evaluates the model."""
        self.leave()
        try:
            yield
        finally:
            self.enter()

    def _move_state(self) -> None:
        state = self._optimizer.state
        for source, target in self._pairs:
            if source in state:
                state[target] = state.pop(source)
                if target.dtype is torch.float32:
                    _widen_state(state[target])


def _widen_state(state: Any) -> None:
    """Loading a checkpoint rounds the state to the parameter's dtype; masters need it wider."""
    for key, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, Tensor) and value.dtype is torch.float16:
            state[key] = value.float()
