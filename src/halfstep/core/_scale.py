"""How far gradients are scaled up, and how that changes from step to step."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from halfstep.core import _fields, _settings
from halfstep.core._settings import FLOAT32_MAX, float32
from halfstep.core._text import call, pairs, suggestion
from halfstep.errors import ScaleError


class ScaleState(NamedTuple):
    """The current scale and what has been counted since it last changed.

    Args:
        scale: What the loss is multiplied by.
        finite_steps: Steps in a row whose gradients were finite.
        overflows: Overflows since the last growth, counted up to the hysteresis.

    Example:
        >>> ScaleState(1024.0)
        ScaleState(scale=1024.0, finite_steps=0, overflows=0)
    """

    scale: float
    finite_steps: int = 0
    overflows: int = 0


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Grows while gradients stay finite, backs off when one does not.

    Scales are float32 values, as they are in every front-end: `init_scale`, `min_scale` and
    `max_scale` are rounded to float32. A scale whose two factors are 1 never changes.

    Args:
        init_scale: The scale before the first step.
        growth_factor: What the scale is multiplied by after `growth_interval` finite steps.
        backoff_factor: What the scale is multiplied by after an overflow.
        growth_interval: How many finite steps in a row it takes to grow.
        min_scale: The floor: no sequence of overflows leads below it.
        max_scale: The cap: a growth that would exceed it does not happen.
        hysteresis: From which overflow since the last growth on the scale backs off.

    Example:
        >>> rule = LossScale(init_scale=8.0, growth_interval=2)
        >>> state = rule.next(rule.init(), finite=True)
        >>> rule.next(state, finite=True)
        ScaleState(scale=16.0, finite_steps=0, overflows=0)
        >>> rule.next(state, finite=False)
        ScaleState(scale=4.0, finite_steps=0, overflows=1)
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-16
    max_scale: float = FLOAT32_MAX
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            number = _settings.read(field.name, type(field.default), getattr(self, field.name))
            object.__setattr__(self, field.name, number)
        _settings.check(self)

    @classmethod
    def none(cls) -> "LossScale":
        """Returns the scale that is 1 forever.

        Example:
            >>> LossScale.none().init().scale
            1.0
        """
        return cls.static(1.0)

    @classmethod
    def static(cls, scale: float) -> "LossScale":
        """Returns a scale that never changes.

        Example:
            >>> rule = LossScale.static(1024.0)
            >>> rule.next(rule.init(), finite=False).scale
            1024.0
        """
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0)

    @classmethod
    def dynamic(cls, **settings: Any) -> "LossScale":
        """Returns a scale that grows and backs off, with the settings of the class.

        Example:
            >>> LossScale.dynamic(growth_interval=500) == LossScale(growth_interval=500)
            True
        """
        return cls(**settings)

    @property
    def kind(self) -> str:
        """Whether the scale is "none" (1 forever), "static" or "dynamic".

        Example:
            >>> LossScale().kind
            'dynamic'
        """
        if self.growth_factor != 1.0 or self.backoff_factor != 1.0:
            return "dynamic"
        return "none" if self.init_scale == 1.0 else "static"

    def init(self) -> ScaleState:
        """Returns the state before the first step.

        Example:
            >>> LossScale().init()
            ScaleState(scale=65536.0, finite_steps=0, overflows=0)
        """
        return ScaleState(self.init_scale)

    def next(self, state: ScaleState, *, finite: bool) -> ScaleState:
        """Returns the state after a step whose gradients were, or were not, finite.

        Example:
            >>> rule = LossScale(hysteresis=2)
            >>> rule.next(ScaleState(8.0, finite_steps=7), finite=False)
            ScaleState(scale=8.0, finite_steps=0, overflows=1)
            >>> rule.next(ScaleState(8.0, overflows=1), finite=False)
            ScaleState(scale=4.0, finite_steps=0, overflows=2)
        """
        if not finite:
            overflows = min(state.overflows + 1, self.hysteresis)
            factor = self.backoff_factor if overflows == self.hysteresis else 1.0
            # A scale that was set below the floor stays where it is.
            floor = min(self.min_scale, state.scale)
            return ScaleState(max(float32(state.scale * factor), floor), 0, overflows)
        if state.finite_steps + 1 < self.growth_interval:
            return state._replace(finite_steps=state.finite_steps + 1)
        grown = float32(state.scale * self.growth_factor)
        return ScaleState(grown if grown <= self.max_scale else state.scale)

    def at_floor(self, state: ScaleState) -> bool:
        """Returns whether the scale backs off but can go no lower.

        Example:
            >>> rule = LossScale(min_scale=1.0)
            >>> rule.at_floor(ScaleState(1.0)), rule.at_floor(ScaleState(2.0))
            (True, False)
        """
        return self.backoff_factor < 1.0 and state.scale <= self.min_scale

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain data.

        Example:
            >>> LossScale().to_dict()["growth_interval"]
            2000
        """
        return _fields.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LossScale":
        """Returns the scale of a dict that `to_dict` made.

        Example:
            >>> str(LossScale.from_dict({"init_scale": 8.0}))
            'dynamic(init_scale=8.0)'
        """
        return cls(**_fields.checked(cls, data, ScaleError))

    @classmethod
    def of(cls, value: object) -> "LossScale":
        """Returns a scale as it is, or reads its text or dict form.

        Example:
            >>> LossScale.of("none") == LossScale.of(LossScale.none())
            True
        """
        return _fields.of(cls, value, ScaleError, _remedy(value))

    @classmethod
    def parse(cls, text: str) -> "LossScale":
        """Reads the text form, such as `none`, `static(1024.0)` or `dynamic(init_scale=8.0)`.

        Example:
            >>> LossScale.parse("dynamic(growth_interval=4)").growth_interval
            4
        """
        kind, arguments = _kind(text)
        if kind == "static" and arguments and "=" not in arguments[0]:
            arguments[0] = f"init_scale={arguments[0]}"
        free = [name for name in _fields.names(cls) if name not in _FIXED[kind]]
        given = pairs(arguments, free, ScaleError, f"The scale {text!r}")
        if kind == "static" and "init_scale" not in given:
            raise ScaleError(f"A static scale needs a value, got {text!r}. Write static(1024.0).")
        return cls(**_FIXED[kind] | {name: _number(word) for name, word in given.items()})

    def __str__(self) -> str:
        shown = [repr(self.init_scale)] if self.kind == "static" else []
        hidden = (*_FIXED[self.kind], *(["init_scale"] if shown else []))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in hidden and value != field.default:
                shown.append(f"{field.name}={value!r}")
        return f"{self.kind}({', '.join(shown)})" if shown else self.kind


_FIXED: dict[str, dict[str, Any]] = {
    "none": {"init_scale": 1.0, "growth_factor": 1.0, "backoff_factor": 1.0},
    "static": {"growth_factor": 1.0, "backoff_factor": 1.0},
    "dynamic": {},
}


def _kind(text: str) -> tuple[str, list[str]]:
    found = call(text) if isinstance(text, str) else None
    if found is None or found[0] not in _FIXED:
        near = suggestion(found[0], _FIXED) if found else ""
        raise ScaleError(
            f"LossScale needs none, static(...) or dynamic(...), got {text!r}."
            f"{near or ' Write for example static(1024.0).'}"
        )
    return found


def _number(word: str) -> float | str:
    """Returns the number that a word is, or the word itself for the check to complain about."""
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return read(word)
    return word


def _remedy(value: object) -> str:
    """Returns what to write for a number, which may stay or be where a scale starts."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"Write 'static({float(value)})', or 'dynamic(init_scale={float(value)})'."
