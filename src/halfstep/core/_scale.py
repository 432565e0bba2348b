"""How far gradients are scaled up, and how that changes from step to step."""

import dataclasses
import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfstep.core._text import split
from halfstep.errors import ScaleError

FLOAT32_MAX = 3.4028234663852886e38


class ScaleState(NamedTuple):
    """The current scale and what has been counted since it last changed.

    Args:
        scale: What the loss is multiplied by.
        finite_steps: Steps in a row whose gradients were finite.
        overflows: Overflows since the last growth, counted up to the hysteresis.
    """

    scale: float
    finite_steps: int = 0
    overflows: int = 0


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Grows while gradients stay finite, backs off when one does not."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-16
    max_scale: float = FLOAT32_MAX
    hysteresis: int = 1

    @classmethod
    def none(cls) -> "LossScale":
        """Returns the scale that is 1 forever."""
        return cls.static(1.0)

    @classmethod
    def static(cls, scale: float) -> "LossScale":
        """Returns a scale that never changes."""
        return cls(init_scale=scale, growth_factor=1.0, backoff_factor=1.0)

    @classmethod
    def dynamic(cls, **settings: Any) -> "LossScale":
        """Returns a scale that grows and backs off."""
        return cls(**settings)

    @property
    def kind(self) -> str:
        """Whether the scale is "none", "static" or "dynamic"."""
        if self.growth_factor != 1.0 or self.backoff_factor != 1.0:
            return "dynamic"
        return "none" if self.init_scale == 1.0 else "static"

    def init(self) -> ScaleState:
        """Returns the state before the first step."""
        return ScaleState(self.init_scale)

    def next(self, state: ScaleState, *, finite: bool) -> ScaleState:
        """Returns the state after a step whose gradients were, or were not, finite."""
        if not finite:
            overflows = min(state.overflows + 1, self.hysteresis)
            factor = self.backoff_factor if overflows == self.hysteresis else 1.0
            lowered = max(_float32(state.scale * factor), self.min_scale)
            return ScaleState(lowered, 0, overflows)
        if state.finite_steps + 1 < self.growth_interval:
            return state._replace(finite_steps=state.finite_steps + 1)
        grown = _float32(state.scale * self.growth_factor)
        return ScaleState(grown if grown <= self.max_scale else state.scale)

    def at_floor(self, state: ScaleState) -> bool:
        """Returns whether one more overflow could not lower the scale any further."""
        return self.backoff_factor < 1.0 and state.scale <= self.min_scale

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings as plain numbers."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "LossScale":
        """Returns the scale of a dict that `to_dict` made."""
        return cls(**settings)

    @classmethod
    def parse(cls, text: str) -> "LossScale":
        """Reads `none`, `static(1024.0)`, `dynamic` or `dynamic(init_scale=8.0)`."""
        kind, _, rest = text.strip().partition("(")
        pieces = split(rest.removesuffix(")")) if rest else []
        if kind == "none":
            return cls.none()
        if kind == "static":
            return cls.static(float(pieces[0]))
        if kind != "dynamic":
            raise ScaleError(f"LossScale needs none, static(...) or dynamic(...), got {text!r}.")
        types = {field.name: type(field.default) for field in dataclasses.fields(cls)}
        pairs = (piece.split("=") for piece in pieces)
        return cls(**{key: types[key](value) for key, value in pairs})

    def __str__(self) -> str:
        if self.kind != "dynamic":
            return {"none": "none", "static": f"static({self.init_scale})"}[self.kind]
        changed = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]
        return f"dynamic({', '.join(changed)})" if changed else "dynamic"


def _float32(value: float) -> float:
    """Rounds to the nearest float32, in which every front-end keeps the scale."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf
