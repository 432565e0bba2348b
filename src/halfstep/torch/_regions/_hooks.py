"""Hooks on modules inside of a region: whoever looks at the inside from outside.

What a hook keeps may become part of a loss, such as a feature that is compared with another
model's, and what it does to gradients is meant for true ones. So a hook gets what it sees as it is
outside of the region; unless the forward reads it again, as of a model that looks at its own
layers.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from halfstep.torch._private import break_graphs
from halfstep.torch._regions import _call
from halfstep.torch._regions._call import Call
from halfstep.torch._regions._crossing import entered, left
from halfstep.torch._regions._slots import Substitution, attributes, new_results, put
from halfstep.torch._regions._tree import cast, cast_tensor, tensors_in, with_tensors

Hook: TypeAlias = Callable[..., Any]


class Hooks:
    """Other hooks in place of those of some modules, until they are put back.

    Args:
        modules: The modules.
        forward: Makes a hook that runs before or after a forward, of its key and itself.
        backward: Makes a hook on gradients.
    """

    def __init__(
        self,
        modules: list[nn.Module],
        forward: Callable[[int, Hook], Hook],
        backward: Callable[[int, Hook], Hook],
    ) -> None:
        self._places = [
            (held, key, hook, make(key, hook))
            for each in modules
            if _has_hooks(each)
            for kinds, make in (
                ((each._forward_pre_hooks, each._forward_hooks), forward),
                ((each._backward_pre_hooks, each._backward_hooks), backward),
            )
            for held in kinds
            for key, hook in held.items()
        ]

    def __enter__(self) -> None:
        for held, key, _, new in self._places:
            held[key] = new

    def __exit__(self, *error: object) -> None:
        for held, key, hook, _ in self._places:
            # A hook may have removed itself.
            if key in held:
                held[key] = hook


def _has_hooks(module: nn.Module) -> Any:
    """Returns whether a module has any, which few have, and each call of a region asks all."""
    return (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
    )


def casting_hooks(modules: list[nn.Module], dtype: torch.dtype, own: set[int]) -> Hooks:
    """Returns hooks that see floats in one dtype, where nothing is scaled.

    Args:
        modules: The modules.
        dtype: What floats are outside.
        own: The keys of hooks that see the inside.
    """

    def forward(key: int, hook: Hook) -> Hook:
        return hook if key in own else lambda module, *values: hook(module, *cast(values, dtype))

    return Hooks(modules, forward, lambda _, hook: hook)


def crossing_hooks(
    modules: list[nn.Module], dtype: torch.dtype, around: Substitution, own: set[int]
) -> Hooks:
    """Returns hooks that see what is outside of the present call.

    Args:
        modules: The modules.
        dtype: What floats are outside.
        around: What the modules hold in place of their parameters meanwhile.
        own: The keys of hooks that see the inside.
    """

    def forward(key: int, hook: Hook) -> Hook:
        return hook if key in own else functools.partial(_forward, key, hook, dtype, around)

    def backward(_: int, hook: Hook) -> Hook:
        return functools.partial(_backward, hook, dtype, _call.current())

    return Hooks(modules, forward, backward)


def _forward(
    key: int, hook: Hook, dtype: torch.dtype, around: Substitution, module: nn.Module, *values: Any
) -> Any:
    """Calls a hook with arguments, and after a forward the result, as they are outside."""
    outside = left(values, dtype)
    _call.current().hooks |= {each.grad_fn: key for each in tensors_in(outside)}
    before = _versions(outside)
    with around.undone():
        result = _putting(hook, module, outside)
    if result is None and _versions(outside) != before:
        # What it changed in place is what it wants: the result, or the arguments.
        result = outside if len(outside) == 2 and isinstance(outside[1], dict) else outside[-1]
    return None if result is None else entered(result)


def _putting(hook: Hook, module: nn.Module, outside: tuple[Any, ...]) -> Any:
    """Calls a hook, and lets what it has put into attributes of the module enter.

    Pruning and weight norms, where they are hooks, compute a weight so.
    """
    before = [tensor for *_, tensor in attributes([module])]
    result = hook(module, *outside)
    for place in new_results(attributes([module]), before):
        put(place, entered(place[2]))
    return result


def _backward(hook: Hook, dtype: torch.dtype, call: Call, module: nn.Module, *values: Any) -> Any:
    """Calls a hook with gradients as they would be without a scale, and scales what it returns."""
    scale, inverse = call.factors()
    # Of both values, the first one is what the hook may replace.
    before = [each.dtype for each in tensors_in(values[0])]
    result = hook(module, *_times(values, inverse, [dtype] * len(tensors_in(values))))
    return None if result is None else _times(result, scale, before)


def _times(value: Any, factor: Tensor | None, dtypes: list[torch.dtype]) -> Any:
    tensors = tensors_in(value)
    if factor is not None:
        tensors = [cast_tensor(each, torch.float32) * factor for each in tensors]
    casts = [cast_tensor(*pair) for pair in zip(tensors, dtypes, strict=False)]
    return with_tensors(value, casts)


# A tracer leaves a region with hooks outside of its graphs, and the hooks with it.
_HOOKS: tuple[Any, ...] = (_forward, _backward)
for _function in _HOOKS:
    break_graphs(_function)


def _versions(value: Any) -> list[int]:
    return [each._version for each in tensors_in(value)]
