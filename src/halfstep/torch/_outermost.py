"""Which optimizer steps are steps of the script, and which are made by another step."""

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook


class _Local(threading.local):
    def __init__(self) -> None:
        self.running: list[FrameType] = []


_LOCAL = _Local()


def note_steps() -> Callable[[], None]:
    """Notes from now on which steps are running, and returns what ends it."""
    return register_optimizer_step_pre_hook(_begin).remove


def ends_outermost(step: FrameType | None) -> bool:
    """Returns whether no step is running around the one that ends.

    A step may call the one of its parent class, or of an optimizer that it wraps.

    Args:
        step: The frame that calls the hooks of the step.
    """
    running = _LOCAL.running
    if step in running:
        del running[running.index(step) :]
    return not _still(running)


def _begin(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if not torch.compiler.is_compiling():
        _LOCAL.running = [*_still(_LOCAL.running), sys._getframe(1)]


def _still(running: list[FrameType]) -> list[FrameType]:
    """Returns the steps without those that ended with an error, of which no hook learns."""
    if not running:
        return running
    frame: FrameType | None = sys._getframe(1)
    alive = set[FrameType]()
    while frame:
        alive.add(frame)
        frame = frame.f_back
    return [each for each in running if each in alive]
