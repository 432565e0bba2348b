"""Refuses steps of optimizers that would pass by the masters of what they train."""

import functools

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfstep.errors import UsageError
from halfstep.torch._masters._feeding import feeding_of
from halfstep.torch._masters._kept import kept_tensors
from halfstep.torch._masters._step import stepping


@functools.cache
def refuse_unattached() -> None:
    """Looks at every optimizer before it steps, from now on."""
    register_optimizer_step_pre_hook(_look)


def _look(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if torch.compiler.is_compiling() or stepping.get(optimizer) or not kept_tensors(optimizer):
        return
    kind = type(optimizer).__name__
    if feeding_of(optimizer) is not None:
        raise UsageError(
            f"Parameters with masters need optimizer.step(), got a call of {kind}.step, which "
            "passes by the masters: it would lose small updates. Call the step of the optimizer "
            "itself, not that of its class."
        )
    raise UsageError(
        f"Parameters with masters need an optimizer that knows of them, got a step of a {kind} "
        "that does not: it would lose small updates. Call attach(optimizer) on what prepare "
        "returned, or keep_masters(optimizer), also for a copy of a model or an unpickled one."
    )
