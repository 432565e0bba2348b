"""Where modules hold tensors that require a gradient, and what stands there for a while."""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from halfstep.torch._regions._tree import rebuilt_tuple

# A place that holds a tensor: a dict and its key, or a list and its index; and the tensor.
Slot: TypeAlias = tuple[Any, Any, Tensor]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Returns a module and those inside of it, each once; several times as fast as `modules`."""
    found = {module: None}
    waiting = [module]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                waiting.append(child)
    return list(found)


def parameters(modules: list[nn.Module]) -> list[Slot]:
    """Returns the places of parameters that require a gradient."""
    return [
        (each._parameters, name, parameter)
        for each in modules
        for name, parameter in each._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]


def attributes(modules: list[nn.Module]) -> list[Slot]:
    """Returns the places of attributes that require a gradient.

    Tensors, and what a list, dict or tuple of them holds, such as the weights that a recurrent
    network hands to its kernels, or a state that is kept from call to call.
    """
    found: list[Slot] = []
    for each in modules:
        names = vars(each)
        kind = type(each), len(names)
        if kind not in _plain:
            others = [(name, names[name]) for name in names if name not in _OWN]
            others = [(name, value) for name, value in others if not _is_number(value)]
            for name, value in others:
                _look_at(names, name, value, found)
            _note_plain(kind, names, others)
    return found


# What nn.Module keeps for itself in each instance.
_OWN = frozenset(vars(nn.Module()))
_NUMBERS = frozenset((int, float, bool, str, type(None), torch.Size))

# Classes of PyTorch, with how many attributes, that hold only numbers, under names that the class
# declares: what somebody else adds changes how many there are.
_plain: set[tuple[type, int]] = set()


def _is_number(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(type(each) in _NUMBERS for each in value)
    return type(value) in _NUMBERS


def _note_plain(kind: tuple[type, int], names: Iterable[str], others: list[Any]) -> None:
    # A graph would have to be guarded by what is noted.
    if others or torch.compiler.is_compiling():
        return
    if kind[0].__module__.startswith("torch.nn.modules.") and _declared(kind[0]).issuperset(names):
        _plain.add(kind)


@functools.cache
def _declared(kind: type) -> set[str]:
    """Returns the names of the attributes that a class declares, and those of every module."""
    own = [vars(each) for each in kind.__mro__]
    annotations = [name for each in own for name in each.get("__annotations__", ())]
    return {*_OWN, *annotations, *(name for each in own for name in each.get("__constants__", ()))}


def _look_at(names: dict[str, Any], name: str, value: Any, found: list[Slot]) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad:
            found.append((names, name, value))
    elif isinstance(value, (list, tuple)):
        holder = _Tuple(names, name) if isinstance(value, tuple) else value
        found += [(holder, place, each) for place, each in enumerate(value) if _counts(each)]
    elif isinstance(value, dict):
        found += [(value, key, each) for key, each in value.items() if _counts(each)]


def _counts(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Tuple:
    """An attribute that is a tuple, whose items can be replaced."""

    def __init__(self, attributes: dict[str, Any], name: str) -> None:
        self._attributes, self._name = attributes, name

    def _items(self) -> tuple[Any, ...]:
        value = self._attributes.get(self._name)
        return value if isinstance(value, tuple) else ()

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, index: int) -> Any:
        return self._items()[index]

    def __setitem__(self, index: int, item: Any) -> None:
        pairs = dict(enumerate(self._items())) | {index: item}
        self._attributes[self._name] = rebuilt_tuple(self._items(), [*pairs.items()])


def unique(found: list[Slot]) -> dict[int, Tensor]:
    """Returns the tensors in the places, each once, by their id."""
    return {id(tensor): tensor for _, _, tensor in found}


def put(place: Slot, tensor: Tensor) -> None:
    """Puts a tensor into a place, if it still holds the one that it is known for."""
    holder, key, before = place
    # A forward may put something new there, or take it away.
    with contextlib.suppress(KeyError, IndexError):
        if holder[key] is before:
            holder[key] = tensor


class Substitution:
    """Other tensors in some places, until they are put back.

    Args:
        found: The places, with what they hold.
        new: What to put there, by the id of what they hold.
    """

    def __init__(self, found: list[Slot], new: dict[int, Tensor]) -> None:
        self._found = found
        self._new = new

    def __enter__(self) -> None:
        for holder, key, tensor in self._found:
            holder[key] = self._new[id(tensor)]

    def __exit__(self, *error: object) -> None:
        for holder, key, tensor in self._found:
            put((holder, key, self._new[id(tensor)]), tensor)
