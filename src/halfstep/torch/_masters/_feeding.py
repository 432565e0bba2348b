"""Which optimizers see masters in the place of which parameters."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._kept import kept_or_new
from halfstep.torch._masters._modules import follow_modules
from halfstep.torch._masters._saving import adopt, save_with_state
from halfstep.torch._masters._state import widen_state
from halfstep.torch._masters._step import step_through
from halfstep.torch._once import once
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._optimizers import PerOptimizer


@dataclass(frozen=True)
class Feeding:
    """How an optimizer is fed with masters.

    Args:
        limit: How many bytes of float32 there may be at a time, None for what suits the optimizer.
        dtypes: In what parameters are that have masters.
    """

    limit: int | None = None
    dtypes: tuple[torch.dtype, ...] = HALF

    def begin(self, optimizer: Optimizer) -> None:
        """Makes masters and state what they are to be, and lets the state dict hold them."""
        follow_modules()
        adopt(optimizer)
        _fed[optimizer] = self
        for parameter in self.of(optimizer):
            kept_or_new(parameter)
            widen_state(optimizer.state, parameter)
        save_with_state(optimizer)

    def end(self, optimizer: Optimizer) -> None:
        """Lets the optimizer see its parameters again."""
        _fed.pop(optimizer)

    def of(self, optimizer: Optimizer) -> list[Tensor]:
        """Returns the parameters that have masters."""
        return [each for each in once(parameters_of(optimizer)) if each.dtype in self.dtypes]

    def step(
        self, optimizer: Optimizer, own: Callable[..., Any] | None, args: Any, kwargs: Any
    ) -> Any:
        """Steps an optimizer, with masters in the place of parameters in half precision.

        Args:
            optimizer: The optimizer.
            own: A step that the instance has of its own, None for that of its class.
            args: Handed on to the step.
            kwargs: Handed on as well.
        """
        return step_through(self, optimizer, own, args, kwargs)


# What a scaler does by itself, for parameters whose gradients it has scaled.
OF_SCALERS = Feeding(dtypes=(torch.float16,))

_fed: PerOptimizer[Feeding] = PerOptimizer()


def feeding_of(optimizer: Optimizer) -> Feeding | None:
    """Returns how an optimizer is fed with masters, None for one that is not."""
    return _fed.get(optimizer)
