"""What every frozen value shares: the names of its fields, and its form as plain data."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, Self, TypeVar

from halfstep.core._text import suggestion


class Value(Protocol):
    """A frozen value with a text form and a dict form."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads the text form."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads the dict form."""


AnyValue = TypeVar("AnyValue", bound=Value)


def names(cls: Any) -> tuple[str, ...]:
    """Returns the names of a dataclass's fields, in their order."""
    return tuple(field.name for field in dataclasses.fields(cls))


def to_dict(value: Any) -> dict[str, Any]:
    """Returns a dataclass as plain data that JSON and TOML can hold."""
    return dataclasses.asdict(value, dict_factory=_plain)


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in items}


def checked(cls: Any, data: Any, error: type[Exception]) -> dict[str, Any]:
    """Returns data whose keys are fields of the dataclass and include every required one."""
    thing, known = cls.__name__, names(cls)
    if not isinstance(data, Mapping):
        raise error(f"{thing} needs a dict of its fields, got {data!r}. Pass what to_dict() made.")
    for key in data:
        if key not in known:
            raise error(
                f"{thing} needs keys among {', '.join(known)}, got {key!r}.{suggestion(key, known)}"
            )
    for name in required(cls):
        if name not in data:
            raise error(f"{thing} needs {name}, got only {', '.join(data) or 'nothing'}. Add it.")
    return dict(data)


def required(cls: Any) -> tuple[str, ...]:
    """Returns the names of the fields without a default."""
    none = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return tuple(f.name for f in fields if f.default is none and f.default_factory is none)


def of(cls: type[AnyValue], value: object, error: type[Exception], remedy: str = "") -> AnyValue:
    """Returns a value as it is, or reads its text or dict form."""
    if isinstance(value, cls):
        return value
    if isinstance(value, str):
        return cls.parse(value)
    if isinstance(value, Mapping):
        return cls.from_dict(value)
    raise error(
        f"{cls.__name__} needs a {cls.__name__} or its text form, got {value!r}."
        f" {remedy or f'Write for example {str(cls())!r}.'}"
    )
