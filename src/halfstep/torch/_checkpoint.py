"""Activation checkpointing: what is computed again in backward runs by the same rules.

`torch.utils.checkpoint` restores PyTorch's autocast state before it computes again, but has no
place for anything more. So, while a region is active, it is handed functions that re-enter it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as _checkpoint

from halfstep.torch._engine import _snapshot
from halfstep.torch._regions import _recompute

_GENERATOR = "_checkpoint_without_reentrant_generator"


def install() -> None:
    """Replaces the two inner names of `torch.utils.checkpoint` that take the function, once."""
    original = getattr(_checkpoint, _GENERATOR)
    if hasattr(original, "__halfstep__"):
        return

    @functools.wraps(original)
    def generator(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_bind(fn), *args, **kwargs)

    generator.__halfstep__ = True  # type: ignore[attr-defined]
    setattr(_checkpoint, _GENERATOR, generator)
    _checkpoint.CheckpointFunction = CheckpointFunction  # type: ignore[misc]


def _bind(function: Callable[..., Any]) -> Callable[..., Any]:
    return _snapshot.bind(_recompute.bind(function))


class CheckpointFunction(_checkpoint.CheckpointFunction):
    """The reentrant form, whose recomputation runs by the rules of the forward."""

    @staticmethod
    def forward(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
        return super(CheckpointFunction, CheckpointFunction).forward(
            ctx, _bind(run_function), *args
        )
