"""What was not finite before a model computed anything."""

from collections.abc import Iterator
from typing import Any

import keras

from halfstep.core import Fault
from halfstep.keras._diagnosing._numbers import Numbers, kind, largest, numbers
from halfstep.keras._observe import Case


def faults_in_data(case: Case) -> Iterator[Fault]:
    """Yields a fault for each input, target and variable that is not finite."""
    for role, values in (("input", case.inputs), ("target", case.targets)):
        for path, value in keras.tree.flatten_with_path(values):
            yield from _fault(_name(f"{role}s", path), role, numbers(value))
    for variable in case.model.variables:
        yield from _fault(variable.path, "weight", numbers(variable))


def _fault(name: str, role: str, found: Numbers | None) -> Iterator[Fault]:
    if found is not None and not found.finite:
        held = kind(found), found.dtype, found.shape
        yield Fault(name, "data", "forward", role, *held, largest([found]), in_float32=True)


def _name(name: str, path: tuple[Any, ...]) -> str:
    return name + "".join(f"[{each!r}]" for each in path)
