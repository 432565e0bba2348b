"""Reads frozen values from plain data that anybody may have written, by their annotations."""

import dataclasses
import functools
import math
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from halfstep.core._text import suggestion
from halfstep.errors import HalfstepError, ReportError

AnyValue = TypeVar("AnyValue")

_WRITTEN = "Pass what to_dict() made."
_kinds: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
# Of a large model there are millions of them.
_AS_THEY_ARE = frozenset({int, str, bool, type(None)})
# What JSON has no number for.
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def plain(value: Any) -> Any:
    """Returns a value as JSON types: lists for tuples, dicts for records, text for inf and NaN.

    Example:
        >>> plain(((1, 2.0), float("inf"), None))
        [[1, 2.0], 'inf', None]
    """
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: plain(getattr(value, field.name)) for field in fields}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def record(cls: type[AnyValue], data: Any, where: str) -> AnyValue:
    """Returns the dataclass that `plain` turned into a dict.

    Args:
        cls: A dataclass whose annotations are types of this module's table, tuples of those, such
            a type or None, or dataclasses again.
        data: The dict.
        where: What is read, for errors, such as "Report".

    Raises:
        ReportError: If a key is unknown or missing, or a value is not of its type.

    Example:
        >>> from halfstep.core import Fault
        >>> record(Fault, {"module": 3}, "Report faults[0]")
        Traceback (most recent call last):
        halfstep.errors.ReportError: Report faults[0] needs operation, got only module. Pass what \
to_dict() made.
    """
    if not isinstance(data, Mapping):
        raise _wrong(where, "a dict", data)
    kinds = _kinds(cls)
    _check_keys(cls, data, where)
    values = {key: _value(kinds[key], data[key], f"{where}.{key}") for key in data}
    try:
        return cls(**values)
    except HalfstepError as error:
        raise _unread(f"In {where}: {error}", where) from None


def _check_keys(cls: Any, data: Mapping[str, Any], where: str) -> None:
    fields = dataclasses.fields(cls)
    known = [field.name for field in fields]
    for key in data:
        if key not in known:
            raise _unread(
                f"{where} needs keys among {', '.join(known)}, got {_short(key)}."
                f"{suggestion(key, known) or f' {_WRITTEN}'}",
                f"{where}.{key}",
            )
    none = dataclasses.MISSING
    for field in fields:
        is_required = field.default is none and field.default_factory is none
        if is_required and field.name not in data:
            given = ", ".join(data) or "nothing"
            raise _unread(f"{where} needs {field.name}, got only {given}. {_WRITTEN}", where)


def _value(kind: Any, data: Any, where: str) -> Any:
    origin, inner = _parts(kind)
    if origin is dataclasses.dataclass:
        return record(kind, data, where)
    if origin is tuple:
        return _tuple(inner, data, where)
    if origin is types.UnionType:
        return None if data is None else _value(inner[0], data, where)
    expected, read = _SCALARS[kind]
    try:
        return read(data)
    except (TypeError, ValueError, OverflowError, KeyError):
        raise _wrong(where, expected, data) from None


@functools.cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Returns what a type is made of; of a record that it is one."""
    if dataclasses.is_dataclass(kind):
        return dataclasses.dataclass, ()
    return typing.get_origin(kind), typing.get_args(kind)


def _tuple(inner: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(data, Sequence) or isinstance(data, str | bytes):
        raise _wrong(where, "a list", data)
    kinds = (inner[0],) * len(data) if inner[-1] is Ellipsis else inner
    if _AS_THEY_ARE.issuperset(kinds) and tuple(map(type, data)) == kinds:
        return tuple(data)
    if len(kinds) != len(data):
        raise _wrong(where, f"a list of {len(kinds)}", data)
    return tuple(
        _value(kind, each, f"{where}[{index}]")
        for index, (kind, each) in enumerate(zip(kinds, data, strict=True))
    )


def _exactly(kind: type) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not kind:  # a bool is an int, too
            raise TypeError
        return data

    return read


def _float(data: Any) -> float:
    if isinstance(data, str):
        return _NON_FINITE[data]
    if isinstance(data, bool):
        raise TypeError
    return float(data)


_SCALARS: dict[Any, tuple[str, Callable[[Any], Any]]] = {
    str: ("a text", _exactly(str)),
    int: ("a whole number", _exactly(int)),
    bool: ("true or false", _exactly(bool)),
    float: ('a number, "inf", "-inf" or "nan"', _float),
}


def _wrong(where: str, expected: str, data: Any) -> ReportError:
    return _unread(f"{where} needs to be {expected}, got {_short(data)}. {_WRITTEN}", where)


def _unread(text: str, place: str) -> ReportError:
    error = ReportError(text)
    error.place = place
    return error


def _short(data: Any) -> str:
    """Returns what was given in a line, however much it is."""
    return reprlib.repr(data)
