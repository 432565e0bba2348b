"""Where modules and arguments hold tensors with a gradient, and what stands there for a while."""

import contextlib
import functools
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from halfstep.torch._regions._tree import is_number, is_object, is_parameter, rebuilt_tuple

# A place that holds a tensor: a mapping and its key, or a list and its index; and the tensor.
Slot: TypeAlias = tuple[Any, Any, Tensor]

# How deep containers and objects are looked into.
_DEPTH = 6


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
    """Returns the places of buffers and other attributes that require a gradient.

    Tensors, and what containers and objects hold of them, such as the weights that a recurrent
    network hands to its kernels, or a state that is kept from call to call.
    """
    found: list[Slot] = []
    for each in modules:
        for name, buffer in each._buffers.items():
            _look_at(each._buffers, name, buffer, found, [])
        names = vars(each)
        kind = type(each), len(names)
        if kind not in _plain:
            others = [(name, names[name]) for name in names if name not in _OWN]
            others = [(name, value) for name, value in others if not is_number(value)]
            for name, value in others:
                _look_at(names, name, value, found, [])
            _note_plain(kind, names, others)
    return found


def arguments(args: list[Any], kwargs: dict[str, Any]) -> list[Slot]:
    """Returns the places of tensors that require a gradient in the arguments of a call."""
    found: list[Slot] = []
    for index, value in enumerate(args):
        _look_at(args, index, value, found, [])
    for name, value in kwargs.items():
        _look_at(kwargs, name, value, found, [])
    return found


# What nn.Module keeps for itself in each instance.
_OWN = frozenset(vars(nn.Module()))

# Classes of PyTorch, with how many attributes, that hold only numbers, under names that the class
# declares: what somebody else adds changes how many there are.
_plain: set[tuple[type, int]] = set()


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


def _look_at(holder: Any, key: Any, value: Any, found: list[Slot], around: list[Any]) -> None:
    """Finds tensors in a value that stands in a place, however deep; `around` is what it is in."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            found.append((holder, key, value))
        return
    if is_number(value) or len(around) == _DEPTH or any(each is value for each in around):
        return
    inner = [*around, value]
    if isinstance(value, list):
        for index, item in enumerate(value):
            _look_at(value, index, item, found, inner)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            _look_at(_Tuple(holder, key), index, item, found, inner)
    elif isinstance(value, MutableMapping):
        for name, item in value.items():
            _look_at(value, name, item, found, inner)
    elif isinstance(value, nn.Module):
        modules = modules_of(value)
        found += parameters(modules)
        for each in modules:
            _look_into(each, found, [*inner, *modules])
    elif is_object(value):
        _look_into(value, found, inner)


def _look_into(value: Any, found: list[Slot], around: list[Any]) -> None:
    names = vars(value)
    for name, item in names.items():
        if name not in _OWN:
            _look_at(names, name, item, found, around)


class _Tuple:
    """A place that holds a tuple, whose items can be replaced.

    Args:
        holder: What holds it.
        key: Where.
    """

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key

    def __getitem__(self, index: int) -> Any:
        return self._holder[self._key][index]

    def __setitem__(self, index: int, item: Any) -> None:
        before = self._holder[self._key]
        pairs = dict(enumerate(before)) | {index: item}
        self._holder[self._key] = rebuilt_tuple(before, [*pairs.items()])


def distinct(places: list[Slot]) -> tuple[list[Tensor], list[int]]:
    """Returns the tensors in the places, a parameter once, and which one each place holds."""
    tensors: list[Tensor] = []
    indices: list[int] = []
    known: dict[int, int] = {}
    for _, _, tensor in places:
        index = len(tensors)
        if is_parameter(tensor):
            # Only of parameters, because a graph would be guarded by the numbers of others.
            index = known.setdefault(id(tensor), index)
        if index == len(tensors):
            tensors.append(tensor)
        indices.append(index)
    return tensors, indices


def has_lazy(places: list[Slot]) -> bool:
    """Returns whether a parameter gets its shape only in the forward to come."""
    return any(isinstance(tensor, UninitializedTensorMixin) for *_, tensor in places)


def new_results(places: list[Slot], before: Sequence[Tensor]) -> list[Slot]:
    """Returns the places whose tensor was computed since there were the tensors before."""
    return [
        place
        for place in places
        if place[2].grad_fn is not None and not any(place[2] is each for each in before)
    ]


def put(place: Slot, tensor: Tensor) -> None:
    """Puts a tensor into a place, if it still holds the one that it is known for."""
    holder, key, before = place
    # A forward may put something new there, or take it away.
    with contextlib.suppress(KeyError, IndexError, TypeError):
        if holder[key] is before:
            holder[key] = tensor


class Substitution:
    """Other tensors in some places, until they are put back.

    Args:
        places: The places, with what they hold.
        new: What to put there, in the same order.
    """

    def __init__(self, places: list[Slot], new: list[Tensor]) -> None:
        self._places = places
        self._new = new

    def __enter__(self) -> None:
        for (holder, key, _), new in zip(self._places, self._new, strict=True):
            holder[key] = new

    def __exit__(self, *error: object) -> None:
        for (holder, key, old), new in zip(self._places, self._new, strict=True):
            put((holder, key, new), old)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Puts them back until the block ends."""
        self.__exit__()
        try:
            yield
        finally:
            for (holder, key, old), new in zip(self._places, self._new, strict=True):
                put((holder, key, old), new)
