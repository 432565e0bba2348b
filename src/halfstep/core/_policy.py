"""Which dtypes a model keeps, computes in and hands back, by which rules and scale."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from halfstep.core._rules import Rules
from halfstep.core._scale import LossScale
from halfstep.core._text import split, suggestion
from halfstep.errors import PolicyError


@dataclass(frozen=True)
class Policy:
    """The dtypes, the rules and the loss scale of a training run."""

    param_dtype: str = "float32"
    compute_dtype: str = "float16"
    output_dtype: str = "float32"
    rules: Rules = field(default_factory=Rules)
    scale: LossScale = field(default_factory=LossScale.dynamic)

    @classmethod
    def named(cls, name: str) -> "Policy":
        """Returns the policy of that name."""
        if name not in _NAMED:
            raise PolicyError(
                f"Policy needs one of {', '.join(_NAMED)}, got {name!r}.{suggestion(name, _NAMED)}"
            )
        return _NAMED[name]

    @staticmethod
    def names() -> tuple[str, ...]:
        """Returns the names of the policies that exist."""
        return tuple(_NAMED)

    @classmethod
    def of(cls, value: "Policy | str") -> "Policy":
        """Returns a policy as it is, or the policy of a text."""
        return value if isinstance(value, Policy) else cls.parse(value)

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Reads a name or `key=value` pairs separated by commas."""
        if "=" not in text:
            return cls.named(text.strip())
        pairs = dict(piece.split("=", 1) for piece in split(text))
        return cls(**{key.strip(): _read(key.strip(), value) for key, value in pairs.items()})

    def with_(self, **changes: Any) -> "Policy":
        """Returns a policy that differs in the given fields."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        for name, policy in _NAMED.items():
            if policy == self:
                return name
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in dataclasses.fields(self))


def _read(key: str, value: str) -> Any:
    return {"rules": Rules.parse, "scale": LossScale.parse}.get(key, str.strip)(value)  # type: ignore[operator]


_NAMED = {
    "float32": Policy(compute_dtype="float32", scale=LossScale.none()),
    "mixed_float16": Policy(),
    "mixed_bfloat16": Policy(compute_dtype="bfloat16", scale=LossScale.none()),
}
