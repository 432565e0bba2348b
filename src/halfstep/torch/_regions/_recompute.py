"""Activation checkpointing inside a region: what is computed again is inside of it again."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from halfstep.torch._regions import _call, _graph
from halfstep.torch._regions._call import Call
from halfstep.torch._regions._slots import (
    Substitution,
    attributes,
    distinct,
    modules_of,
    parameters,
)


def bind(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs inside the calls around, also when it is called later."""
    calls = [(call, call.module) for call in _call.calls() if call.module is not None]
    if not calls:
        return function

    def bound(*args: Any, **kwargs: Any) -> Any:
        if _call.calls() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            for call, module in calls:
                stack.enter_context(_again(call, module()))
            return function(*args, **kwargs)

    return bound


@contextlib.contextmanager
def _again(call: Call, module: nn.Module | None) -> Iterator[None]:
    """Lets a module hold, as in the call, what came in through the boundary."""
    modules = [] if module is None else modules_of(module)
    places = parameters(modules) + attributes(modules)
    tensors, indices = distinct(places)
    _call.push(call)
    try:
        inside = _graph.enter(tensors)
        with Substitution(places, [inside[index] for index in indices]):
            yield
    finally:
        _call.pop()
