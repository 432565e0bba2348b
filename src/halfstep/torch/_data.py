"""What a checkpoint may hold: data, which is read again without running anything of the file."""

import argparse
import dataclasses
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import UsageError

Part = tuple[str, Any]

# `torch.load` reads an int of up to 255 bytes, the sign included, and no empty bytes.
_READABLE: dict[type, Callable[[Any], bool]] = {
    int: lambda value: value.bit_length() < 8 * 255,
    bytes: bool,
}
_PLAIN = {
    *(type(None), bool, float, complex, str, bytearray),
    *(torch.Size, torch.dtype, torch.device, torch.layout, torch.UntypedStorage),
}


def refuse_all_but_data(state: object) -> None:
    """Raises an error for what could be saved, but not be loaded again as data.

    Args:
        state: What is to be saved.

    Example:
        >>> refuse_all_but_data({"scheduler": {"lambda": len}})
        Traceback (most recent call last):
        ...
        halfstep.errors.UsageError: save needs data only, got builtin_function_or_method at
        state['scheduler']['lambda']. Leave it out, ...
    """
    found = _first_foreign(state, "state", {}, _allowed())
    if found is not None:
        where, value = found
        raise UsageError(
            f"save needs data only, got {_described(value)} at {where}. {_advice(value)}"
        )


def _first_foreign(
    value: object, where: str, seen: dict[int, object], allowed: set[Any]
) -> Part | None:
    """Returns the first part of a value that is not data, and where it is."""
    kind = type(value)
    if _is_plain(value) or kind in allowed or id(value) in seen:
        return None
    if kind not in _PARTS:
        return where, value
    seen[id(value)] = value
    for place, part in _PARTS[kind](value):
        # Long lists of numbers are passed over without a name for each.
        if not _is_plain(part):
            found = _first_foreign(part, place.format(where), seen, allowed)
            if found is not None:
                return found
    return None


def _is_plain(value: object) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind in _READABLE and _READABLE[kind](value))


def _allowed() -> set[Any]:
    """Returns the classes that were allowed by `torch.serialization.add_safe_globals`."""
    found = torch.serialization.get_safe_globals()
    return {each[0] if isinstance(each, tuple) else each for each in found}


def _of_mapping(value: Mapping[Any, Any]) -> Iterator[Part]:
    for key, part in value.items():
        yield "a key of {}", key
        if not _is_plain(part):
            yield f"{{}}[{_escaped(repr(key))}]", part
    yield from _attributes(value)


def _of_sequence(value: list[Any] | tuple[Any, ...]) -> Iterator[Part]:
    for index, part in enumerate(value):
        if not _is_plain(part):
            yield f"{{}}[{index}]", part


def _of_set(value: set[Any]) -> Iterator[Part]:
    for part in value:
        yield "an element of {}", part


def _attributes(value: Any) -> Iterator[Part]:
    """Yields what was attached to a tensor or an OrderedDict, which is saved with it."""
    for name, part in getattr(value, "__dict__", {}).items():
        yield f"{{}}.{_escaped(name)}", part


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


_PARTS: dict[type, Callable[[Any], Iterator[Part]]] = {
    **dict.fromkeys((dict, OrderedDict, Counter), _of_mapping),
    **dict.fromkeys((list, tuple), _of_sequence),
    **dict.fromkeys((Tensor, torch.nn.Parameter), _attributes),
    set: _of_set,
}


def _described(value: object) -> str:
    """Returns the type of a value, or what is wrong with it where the type is right."""
    if isinstance(value, int) and type(value) is int:
        return f"an int of {value.bit_length()} bits"
    return "empty bytes" if type(value) is bytes else type(value).__name__


_ADVICE: list[tuple[Callable[[Any], bool], str]] = [
    (lambda value: hasattr(value, "state_dict"), "Save its state_dict()."),
    (lambda value: type(value) in _READABLE, "Save it as a str."),
    (lambda value: isinstance(value, Tensor), "Convert it with as_subclass(torch.Tensor)."),
    (
        lambda value: type(value).__module__ == "numpy",
        "Convert it with item() or torch.as_tensor().",
    ),
    (lambda value: isinstance(value, os.PathLike), "Convert it with str()."),
    (lambda value: isinstance(value, argparse.Namespace), "Convert it with vars()."),
    (dataclasses.is_dataclass, "Convert it with dataclasses.asdict()."),
    (lambda value: isinstance(value, Mapping), "Convert it with dict()."),
    (lambda value: isinstance(value, (list, tuple, frozenset, range)), "Convert it with list()."),
]


def _advice(value: object) -> str:
    """Returns what to save instead of a value."""
    for applies, text in _ADVICE:
        if applies(value):
            return text
    return (
        "Leave it out, or allow its class, here and where it is loaded, with "
        "torch.serialization.add_safe_globals()."
    )
