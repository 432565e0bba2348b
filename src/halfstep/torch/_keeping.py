"""Looks at what a script keeps after its first steps, whoever wrote it."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from halfstep.torch._makers import describe
from halfstep.torch._memory import STEPS, kept
from halfstep.torch._patches import Undo
from halfstep.torch._private import never_compile

Report = Callable[[dict[str, Any]], None]


def watch_kept(report: Report) -> Undo:
    """Reports what is kept after each of the first steps, and returns what ends it.

    Args:
        report: Receives the steps so far, the bytes and what is trained, as JSON types.

    Example:
        >>> end = watch_kept(lambda found: print(found["steps"], found["kept"]["weights"]))
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        1 20
        >>> end()
    """
    return register_optimizer_step_post_hook(_Steps(report).after).remove


class _Steps:
    """Counts the steps of the optimizer that steps first, and knows the others that step.

    Args:
        report: Receives what is found.
    """

    def __init__(self, report: Report) -> None:
        self._report, self._count, self._looking = report, 0, False
        self._known: list[weakref.ref[Optimizer]] = []

    def after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # To find out what state costs takes steps of its own.
        if torch.compiler.is_compiling() or self._looking:
            return
        if optimizer not in self._optimizers():
            self._known.append(weakref.ref(optimizer))
        if optimizer is self._known[0]() and self._count < STEPS:
            self._count += 1
            self._look()

    def _optimizers(self) -> list[Optimizer]:
        return [each for each in (ref() for ref in self._known) if each is not None]

    def _look(self) -> None:
        self._looking = True
        try:
            optimizers, modules = self._optimizers(), _modules()
            self._report(
                {
                    "steps": self._count,
                    "last": self._count == STEPS,
                    "kept": asdict(kept(optimizers, modules)),
                    "trained": describe(optimizers, modules),
                }
            )
        finally:
            self._looking = False


def _modules() -> list[nn.Module]:
    # Not isinstance, which asks objects that warn of being asked.
    found = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    ready = [each for each in found if hasattr(each, "_parameters")]  # or is not initialised yet
    # One that waits for its first input holds nothing so far.
    return [each for each in ready if not any(map(is_lazy, each.parameters()))]


never_compile(_Steps.after)
