"""Where modules hold tensors that require a gradient, and what stands there for a while."""

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep.torch._regions._tree import rebuilt_tuple


class Slot(NamedTuple):
    """A place that holds a tensor: a key of a dict, or an index of a list."""

    holder: Any
    key: Any
    tensor: Tensor

    def put(self, tensor: Tensor) -> None:
        """Puts a tensor into the place, if it still holds the one that it is known for."""
        # A forward may put something new there, which then stays.
        if _get(self.holder, self.key) is self.tensor:
            self.holder[self.key] = tensor

    def holding(self, tensor: Tensor) -> "Slot":
        """Returns the same place with another tensor in it."""
        return Slot(self.holder, self.key, tensor)


def slots(module: nn.Module) -> list[Slot]:
    """Returns the places in a module, and in those inside of it, whose tensor has a gradient.

    Parameters, and attributes that are tensors or hold tensors in a list or dict, such as the
    weights that a recurrent network hands to its kernels, or a state kept from call to call.
    """
    found: list[Slot] = []
    for each in module.modules():
        _look_into(each._parameters, found)
        attributes = vars(each)
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                if value.requires_grad:
                    found.append(Slot(attributes, name, value))
            elif isinstance(value, tuple):
                _look_into(_Tuple(attributes, name), found)
            elif value and type(value) in (list, dict) and name not in _OWN:
                _look_into(value, found)
    return found


# What nn.Module keeps for itself in each instance.
_OWN = frozenset(vars(nn.Module()))


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


def _look_into(holder: Any, found: list[Slot]) -> None:
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if isinstance(value, Tensor) and value.requires_grad:
            found.append(Slot(holder, key, value))


def _get(holder: Any, key: Any) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None


def unique(found: list[Slot]) -> dict[int, Tensor]:
    """Returns the tensors in the places, each once, by their id."""
    return {id(slot.tensor): slot.tensor for slot in found}


def has_lazy(found: list[Slot]) -> bool:
    """Returns whether a parameter gets its shape only in the forward to come."""
    return any(is_lazy(slot.tensor) for slot in found)


class Substitution:
    """Other tensors in some places, until they are put back.

    Args:
        found: The places, with what they hold.
        new: What to put there, by the id of what they hold.
    """

    def __init__(self, found: list[Slot], new: dict[int, Tensor]) -> None:
        self._pairs = [(slot, slot.holding(new[id(slot.tensor)])) for slot in found]

    def __enter__(self) -> None:
        for before, during in self._pairs:
            before.put(during.tensor)

    def __exit__(self, *error: object) -> None:
        for before, during in self._pairs:
            during.put(before.tensor)
