"""What a tensor is to a model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

from halfstep.torch._engine._paths import _unwrapped
from halfstep.torch._observing._places import Place
from halfstep.torch._storages import plain_tensors

# What a view of a tensor is, too.
_LASTING = ("weight", "grad_input", "grad_weight")
_NAMED = ("weight", "buffer")


class Role(NamedTuple):
    """What a tensor is to a model.

    Args:
        word: "weight", "buffer", "input", "output" or what gradient it is.
        name: The name of the parameter or buffer that it is, or is the gradient of; else empty.
    """

    word: str
    name: str = ""


class Roles:
    """Knows parameters, buffers and the batch by the memory that they lie in.

    Args:
        model: The model.
        batch: What the step is called with.
    """

    def __init__(self, model: nn.Module, batch: Any) -> None:
        whole = _unwrapped(model)
        self._names = dict(_named(_parts_of(batch), "input"))
        self._names |= dict(_named(whole.named_buffers(remove_duplicate=False), "buffer"))
        self._names |= dict(_named(whole.named_parameters(remove_duplicate=False), "weight"))
        # While a memory is weakly held, no other one has its place, even where it is gone.
        self._made: dict[int, tuple[Role, StorageWeakRef | None]] = {}
        self._root = type(whole).__name__

    def of(self, tensor: Tensor) -> Role:
        """Returns "weight", "buffer", "input" or what gradient it is, also for a view."""
        place = storage(tensor)
        if place in self._made:
            return self._made[place][0]
        name, role = self._names.get(place, ("", "input"))
        return Role(role, name if role in _NAMED else "")

    def name(self, tensor: Tensor) -> str:
        """Returns the name of a parameter, a buffer or a part of the batch, "" for others."""
        return self._names.get(storage(tensor), ("", ""))[0]

    def owner(self, node: Any) -> Place | None:
        """Returns the module of the parameter that a node of autograd adds a gradient to."""
        leaf = getattr(node, "variable", None)
        name = "" if leaf is None else self.name(leaf)
        path = name.rpartition(".")[0]
        return Place(path or self._root, 0, is_root=not path, below=path) if name else None

    def made(self, tensor: Tensor, role: Role) -> None:
        """Takes note of whether a new tensor is a gradient or a copy of a weight."""
        place = storage(tensor)
        if role.word in _LASTING:
            self._made[place] = role, _held(tensor)
        else:
            self._made.pop(place, None)


def storage(tensor: Tensor) -> int:
    """Returns what is the same for tensors that share memory."""
    return tensor.untyped_storage()._cdata if _has_storage(tensor) else id(tensor)


def _held(tensor: Tensor) -> StorageWeakRef | None:
    return StorageWeakRef(tensor.untyped_storage()) if _has_storage(tensor) else None


def _has_storage(tensor: Tensor) -> bool:
    wraps = hasattr(type(tensor), "__tensor_flatten__")
    return tensor.layout is torch.strided and not wraps


def _parts_of(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for path, value in _pytree.tree_flatten_with_path(batch)[0]:
        if isinstance(value, Tensor):
            yield f"batch{_pytree.keystr(path)}", value


def _named(pairs: Any, role: str) -> Iterator[tuple[int, tuple[str, str]]]:
    for name, value in pairs:
        for each in plain_tensors(value):
            yield storage(each), (name, role)
