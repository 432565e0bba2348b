"""Forward hooks on modules inside of a region: whoever looks at the inside from outside.

What a hook keeps may become part of a loss, such as a feature that is compared with another
model's. So a hook gets what it sees as it is outside of the region; unless the forward reads it
again, as of a model that looks at its own layers.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

from halfstep.torch._private import never_compile
from halfstep.torch._regions import _call
from halfstep.torch._regions._crossing import entered, left
from halfstep.torch._regions._tree import tensors_in

Place: TypeAlias = tuple[dict[int, Any], int, Callable[..., Any]]


def hooks(modules: list[nn.Module], without: set[int]) -> list[Place]:
    """Returns the places of hooks that run before or after the forward of a module."""
    return [
        (held, key, hook)
        for each in modules
        for held in (each._forward_pre_hooks, each._forward_hooks)
        for key, hook in held.items()
        if key not in without
    ]


class Outside:
    """Hooks that see what is outside, until they are put back.

    Args:
        places: Where they are.
        dtype: What floats are outside.
    """

    def __init__(self, places: list[Place], dtype: torch.dtype) -> None:
        self._places = places
        self._dtype = dtype

    def __enter__(self) -> None:
        for held, key, hook in self._places:
            held[key] = functools.partial(_run, key, hook, self._dtype)

    def __exit__(self, *error: object) -> None:
        for held, key, hook in self._places:
            # A hook may have removed itself.
            if key in held:
                held[key] = hook


def _run(
    key: int, hook: Callable[..., Any], dtype: torch.dtype, module: nn.Module, *values: Any
) -> Any:
    """Calls a hook with arguments, and after a forward the result, as they are outside."""
    outside = left(values, dtype)
    _call.current().hooks |= {each.grad_fn: key for each in tensors_in(outside)}
    before = _versions(outside)
    result = hook(module, *outside)
    if result is None and _versions(outside) != before:
        # What it changed in place is what it wants: the result, or the arguments.
        result = outside if len(outside) == 2 and isinstance(outside[1], dict) else outside[-1]
    return None if result is None else entered(result)


# A tracer leaves a region with hooks outside of its graphs, and the hooks with it.
never_compile(_run)
_run._torchdynamo_disable = True  # type: ignore[attr-defined]


def _versions(value: Any) -> list[int]:
    return [each._version for each in tensors_in(value)]
