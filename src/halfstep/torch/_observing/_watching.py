"""Sees every operation of a step, forward and backward, below autograd."""

from collections import Counter
from collections.abc import Iterator
from threading import get_ident
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep.core import operation_word
from halfstep.torch import _private
from halfstep.torch._dtypes import format_of
from halfstep.torch._observing import _schema
from halfstep.torch._observing._force import Force
from halfstep.torch._observing._places import Place, Places, line
from halfstep.torch._observing._ran import Key, Ran, Value
from halfstep.torch._observing._roles import Role, Roles, storage
from halfstep.torch._observing._trial import Trial
from halfstep.torch._observing._untouched import Untouched
from halfstep.torch._observing._ways import Way


class _Origin(NamedTuple):
    """The operation that a node of autograd belongs to, with the shapes of what it read."""

    place: Place
    word: str
    source: str
    way: Way | None
    where: str | None
    # With the names of the parameters that have them.
    weights: dict[tuple[int, ...], set[str]]
    others: set[tuple[int, ...]]

    def read(self, inputs: "list[_Seen]") -> None:
        """Takes note of what it read."""
        for each in inputs:
            if each.role == "weight":
                self.weights.setdefault(each.shape, set()).add(each.name)
            else:
                self.others.add(each.shape)

    def roles(self, shape: tuple[int, ...]) -> set[str]:
        """Returns what a gradient of a shape may belong to."""
        known = {"grad_input": self.others, "grad_weight": set(self.weights)}
        found = ({role for role in known if alike & known[role]} for alike in _alike(shape))
        return next(filter(None, found), set())

    def names(self, shape: tuple[int, ...]) -> set[str]:
        """Returns the names of the parameters that a gradient of a shape may belong to."""
        known = (each for alike in _alike(shape) for each in alike if each in self.weights)
        return self.weights.get(next(known, ()), set())


def _alike(shape: tuple[int, ...]) -> Iterator[set[tuple[int, ...]]]:
    """Yields what a gradient of a shape may be added to, without ones in front first."""
    ones = next((place for place, size in enumerate(shape) if size != 1), len(shape))
    for start in range(ones, -1, -1):
        yield {shape[start:], shape[start:][::-1]}


class _Seen(NamedTuple):
    """A tensor, as the place of its numbers until they are read."""

    place: int | None
    role: str
    dtype: str
    shape: tuple[int, ...]
    name: str


class _Note(NamedTuple):
    """An operation before the numbers of its tensors are read."""

    place: Place
    key: Key
    name: str
    source: str
    inputs: list[_Seen]
    outputs: list[_Seen]
    constants: tuple[float, ...]
    entered: bool
    way: Way | None
    where: str | None


class Watching(TorchDispatchMode):
    """Notes the operations of a step.

    Args:
        places: Where the model is.
        force: Which regions and autocasts it is in.
        roles: What tensors are to it.
        untouched: Who keeps what is about to be changed.
        within: The functions that run the step.
        trial: Looks at operations, and changes them to try a remedy.
    """

    def __init__(
        self,
        places: Places,
        force: Force,
        roles: Roles,
        untouched: Untouched,
        within: tuple[CodeType, ...],
        trial: Trial,
    ) -> None:
        super().__init__()
        self._places, self._force = places, force
        self._roles, self._untouched = roles, untouched
        self._within, self._trial = within, trial
        self._backward = False
        self._collector, self._notes = trial.collector(), list[_Note]()
        self._known = WeakTensorKeyDictionary()
        self._writes: Counter[int] = Counter()
        self._origins: dict[tuple[int, int], _Origin] = {}
        self._thread = get_ident()
        self._counts: Counter[Any] = Counter()

    def begin_backward(self) -> None:
        """From now on, what runs is the way back."""
        self._backward = True
        self._places.leave_forward()

    def operations(self) -> list[Ran]:
        """Returns what ran; waits for the devices."""
        self._collector.read()
        return [
            Ran(*note[:4], self._values(note.inputs), self._values(note.outputs), *note[6:])
            for note in self._notes
        ]

    def _values(self, seen: list[_Seen]) -> tuple[Value, ...]:
        return tuple(self._collector.value(*each) for each in seen)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        origin, phase = self._origin(func)
        if _schema.is_plain(func):
            result = func(*args, **kwargs)
            if not func.is_view:
                self._untouched.created(_schema.tensors(result))
            return result
        key = self._key(origin, phase)
        args, kwargs = self._trial.arguments(key, args, kwargs)
        changed = _schema.written(func, args, kwargs)
        self._untouched.keep(changed)
        inputs = [self._input(each, origin) for each in _schema.read(func, args, kwargs)]
        result = func(*args, **kwargs)
        self._writes.update(map(storage, changed))
        outputs = _schema.results(func, result, changed)
        self._trial.look(key, outputs)
        if not changed:
            self._untouched.created(outputs)
        if phase == "forward":
            origin.read(inputs)
        self._note(func, key, origin, inputs, outputs, _schema.numbers((*args, *kwargs.values())))
        return result

    def _origin(self, func: Any) -> tuple[_Origin, str]:
        """Returns where an operation belongs to, and in which pass."""
        word, node = operation_word(func._schema.name), _private.running_node()
        if self._places.forward or node is None:
            how = line(self._within), self._force.here, self._force.where
            origin = _Origin(self._places.here, word, *how, {}, set())
        else:
            origin = self._of_node(node, word)
        if not self._backward or torch.is_grad_enabled():
            self._origins.setdefault((get_ident(), _private.newest_node()), origin)
        return origin, "forward" if self._places.forward else "backward"

    def _of_node(self, node: Any, word: str) -> _Origin:
        """Returns where the forward of a node ran."""
        number = _private.number_of(node)
        # What is computed again within a backward pass is so in the thread of that pass.
        found = (self._origins.get((thread, number)) for thread in (get_ident(), self._thread))
        origin = next(filter(None, found), None)
        if origin is None:
            place = self._roles.owner(node) or self._places.here
            return _Origin(place, word, "", None, None, {}, set())
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return origin._replace(word=word, source=line(self._within) or origin.source)
        return origin

    def _key(self, origin: _Origin, phase: str) -> Key:
        place = origin.place.path, origin.place.call, phase, origin.word
        self._counts[place] += 1
        return Key(*place, self._counts[place])

    def _input(self, tensor: Tensor, origin: _Origin) -> _Seen:
        seen, writes = self._known.get(tensor, (None, 0))
        if seen is None or writes != self._writes[storage(tensor)]:
            seen = self._see(tensor, self._roles.of(tensor))
            self._remember(tensor, seen)
            if self._untouched.is_foreign(tensor):
                self._enter(tensor, seen, origin)
        return seen

    def _see(self, tensor: Tensor, role: Role) -> _Seen:
        place = self._collector.add(tensor, count=self._backward)
        return _Seen(place, role.word, format_of(tensor.dtype), tuple(tensor.shape), role.name)

    def _remember(self, tensor: Tensor, seen: _Seen) -> None:
        self._known[tensor] = seen, self._writes[storage(tensor)]

    def _enter(self, tensor: Tensor, held: _Seen, origin: _Origin) -> None:
        """Notes a tensor that comes from outside."""
        name = self._roles.name(tensor)
        place = Place(name, 0, is_root=False) if name else origin.place
        key = Key(place.path, place.call, "forward", "data", 0)
        how = True, origin.way, origin.where
        self._notes.append(_Note(place, key, "data", "", [], [held], (), *how))

    def _note(
        self,
        func: Any,
        key: Key,
        origin: _Origin,
        inputs: list[_Seen],
        outputs: list[Tensor],
        constants: tuple[float, ...],
    ) -> None:
        seen = []
        for place, each in enumerate(outputs):
            role = _role(key, origin, inputs, tuple(each.shape), place)
            self._roles.made(each, role)
            seen.append(self._see(each, role))
            self._remember(each, seen[-1])
        note = (origin.place, key, func._schema.name, origin.source, inputs, seen, constants)
        self._notes.append(_Note(*note, False, origin.way, origin.where))


def _role(
    key: Key, origin: _Origin, inputs: list[_Seen], shape: tuple[int, ...], place: int
) -> Role:
    """Returns what the result of an operation at a place is."""
    if key.phase == "backward":
        word = _gradient(origin.roles(shape), inputs, shape, place)
        return Role(word, _whose(origin, inputs, shape) if word == "grad_weight" else "")
    if key.word == "cast" and inputs:
        kept = inputs[0].role in ("weight", "buffer")
        return Role(inputs[0].role, inputs[0].name) if kept else Role("input")
    return Role("output")


def _whose(origin: _Origin, inputs: list[_Seen], shape: tuple[int, ...]) -> str:
    """Returns the name of the only parameter that a gradient may be that of, "" for several."""
    read = {each.name for each in inputs if each.role == "grad_weight" and each.shape == shape}
    found = read - {""} or origin.names(shape)
    return next(iter(found)) if len(found) == 1 else ""


def _gradient(possible: set[str], inputs: list[_Seen], shape: tuple[int, ...], place: int) -> str:
    """Returns which gradient it is, of those that its shape allows."""
    if len(possible) == 1:
        return possible.pop()
    read = [each for each in inputs if each.shape]
    alike = [each.role for each in read if each.shape == shape]
    if alike and all(each.role.startswith("grad") for each in read):
        return alike[0]
    # The gradient of an input comes first, and is computed from the weight.
    of_weight = place > 0 or all(each.role != "weight" for each in inputs)
    return "grad_weight" if possible and of_weight else "grad_input"
