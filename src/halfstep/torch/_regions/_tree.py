"""Finds and replaces tensors in whatever a model takes or returns."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# What holds no tensor, or none that is passed along.
_KEPT = (int, float, str, bytes, type(None), type, torch.dtype, torch.device, torch.Generator)
_NUMBERS = frozenset((int, float, bool, str, bytes, type(None), torch.Size))
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CONTAINERS = (Mapping, list, tuple)


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors in a nesting of containers and objects, in order.

    Containers are mappings, lists and tuples; of any other object, such as a dataclass or a
    distribution, the attributes are looked at. Modules and functions are not.

    Example:
        >>> tensors_in({"a": torch.ones(1), "b": [torch.zeros(1), 3]})
        [tensor([1.]), tensor([0.])]
    """
    found: list[Tensor] = []
    _collect(value, found, [])
    return found


def _collect(value: Any, found: list[Tensor], seen: list[Any]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
    elif is_number(value):
        return
    elif isinstance(value, _CONTAINERS):
        for _, child in _items(value):
            _collect(child, found, seen)
    elif is_object(value) and not any(each is value for each in seen):
        seen.append(value)
        for child in vars(value).values():
            _collect(child, found, seen)


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, Mapping) else enumerate(value)


def is_number(value: Any) -> bool:
    """Returns whether a value is a number or text, or a container of such, which may be long.

    Example:
        >>> is_number([1, 2.0, "three"]), is_number([torch.ones(1)])
        (True, False)
    """
    if type(value) in (list, tuple):
        return all(type(each) in _NUMBERS for each in value)
    if type(value) is dict:
        return all(type(each) in _NUMBERS for each in value.values())
    return type(value) in _NUMBERS


def is_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor is a parameter; asking for the type first is many times as fast."""
    return type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)


def is_object(value: Any) -> bool:
    """Returns whether the attributes of a value may be tensors that are passed along."""
    if isinstance(value, (*_KEPT, nn.Module)) or callable(value):
        return False
    return hasattr(value, "__dict__")


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Returns the same nesting with the floats of at most 32 bits in one dtype.

    Example:
        >>> cast([torch.ones(1), torch.arange(2)], torch.bfloat16)
        [tensor([1.], dtype=torch.bfloat16), tensor([0, 1])]
    """
    if isinstance(value, Tensor):
        return cast_tensor(value, dtype)
    tensors = tensors_in(value)
    if all(each.dtype is dtype or each.dtype not in _FLOATS for each in tensors):
        return value
    return with_tensors(value, [cast_tensor(each, dtype) for each in tensors])


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a float of at most 32 bits in a dtype, anything else as it is."""
    return tensor.to(dtype) if tensor.dtype in _FLOATS else tensor


def with_tensors(value: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns the same nesting with other tensors, in the order of `tensors_in`.

    Example:
        >>> with_tensors({"a": torch.ones(1), "b": (torch.zeros(1), 3)}, [torch.ones(2)] * 2)
        {'a': tensor([1., 1.]), 'b': (tensor([1., 1.]), 3)}
    """
    if all(new is old for new, old in zip(tensors, tensors_in(value), strict=True)):
        return value
    return _rebuild(value, iter(tensors), [])


def _rebuild(value: Any, tensors: Iterator[Tensor], done: list[tuple[Any, Any]]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    if is_number(value):
        return value
    if isinstance(value, _CONTAINERS):
        pairs = [(key, _rebuild(child, tensors, done)) for key, child in _items(value)]
        return next(make for kind, make in _MAKE if isinstance(value, kind))(value, pairs)
    return _object(value, tensors, done) if is_object(value) else value


def _object(value: Any, tensors: Iterator[Tensor], done: list[tuple[Any, Any]]) -> Any:
    for before, after in done:
        if before is value:
            return after
    held: list[Tensor] = []
    _collect(value, held, [before for before, _ in done])
    # What holds no tensor stays the same object.
    after = copy.copy(value) if held else value
    done.append((value, after))
    for name, child in [*vars(value).items()] if held else ():
        # Not setattr, which a frozen dataclass refuses.
        after.__dict__[name] = _rebuild(child, tensors, done)
    return after


def rebuilt_tuple(value: Any, pairs: list[tuple[Any, Any]]) -> Any:
    """Returns a tuple of the same type, named or not, with the items of the pairs."""
    items = [item for _, item in pairs]
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _list(value: Any, pairs: list[tuple[Any, Any]]) -> Any:
    items = [item for _, item in pairs]
    if type(value) is list:
        return items
    changed = copy.copy(value)
    changed[:] = items
    return changed


def _mapping(value: Any, pairs: list[tuple[Any, Any]]) -> Any:
    if type(value) is dict:
        return dict(pairs)
    if dataclasses.is_dataclass(value):
        # A ModelOutput of Hugging Face is both.
        make: Any = type(value)
        return make(**dict(pairs))
    changed = copy.copy(value)
    for key, item in pairs:
        changed[key] = item
    return changed


_MAKE: tuple[tuple[type, Callable[[Any, list[tuple[Any, Any]]], Any]], ...] = (
    (tuple, rebuilt_tuple),
    (list, _list),
    (Mapping, _mapping),
)
