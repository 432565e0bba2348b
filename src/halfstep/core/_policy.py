"""Which dtypes a model keeps, computes in and hands back, by which rules and scale."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from halfstep.core import _fields
from halfstep.core._auto_name import AUTO, is_auto
from halfstep.core._formats import COMPUTE_DTYPES, dtype_suggestion
from halfstep.core._rules import Rules
from halfstep.core._scale import LossScale
from halfstep.core._text import pairs, split, suggestion
from halfstep.errors import PolicyError


@dataclass(frozen=True)
class Policy:
    """The dtypes, the rules and the loss scale of a training run.

    Args:
        param_dtype: The dtype that weights are kept in.
        compute_dtype: The dtype that operations run in, where the rules say `lower`.
        output_dtype: The dtype that results are handed back in.
        rules: Which operation runs in which precision.
        scale: How gradients are kept inside the range of the compute dtype.

    Example:
        >>> policy = Policy.named("mixed_bfloat16")
        >>> policy.compute_dtype, policy.scale.kind
        ('bfloat16', 'none')
        >>> print(policy.with_(output_dtype="bfloat16"))  # doctest: +ELLIPSIS
        param_dtype=float32, compute_dtype=bfloat16, output_dtype=bfloat16, ...
    """

    param_dtype: str = "float32"
    compute_dtype: str = "float16"
    output_dtype: str = "float32"
    rules: Rules = field(default_factory=Rules)
    scale: LossScale = field(default_factory=LossScale.dynamic)

    def __post_init__(self) -> None:
        for name in _fields.names(self):
            value = getattr(self, name)
            if name in _VALUES:
                _check_value(name, value)
            elif not isinstance(value, str) or value not in COMPUTE_DTYPES:
                raise PolicyError(
                    f"Policy needs {name} to be one of {', '.join(COMPUTE_DTYPES)}, got {value!r}."
                    f"{dtype_suggestion(value)}"
                )

    @classmethod
    def named(cls, name: str) -> "Policy":
        """Returns the policy of that name.

        Example:
            >>> Policy.named("float32").compute_dtype
            'float32'
        """
        if is_auto(name):
            raise PolicyError(_AUTO)
        if not isinstance(name, str) or name not in _NAMED:
            near = _suggestion(name) or " Or write pairs such as compute_dtype=bfloat16."
            raise PolicyError(f"Policy needs one of {', '.join(_NAMED)}, got {name!r}.{near}")
        return _NAMED[name]

    @staticmethod
    def names() -> tuple[str, ...]:
        """Returns the names of the policies that exist.

        Example:
            >>> Policy.names()
            ('float32', 'mixed_float16', 'mixed_bfloat16')
        """
        return tuple(_NAMED)

    @classmethod
    def of(cls, value: object) -> "Policy":
        """Returns a policy as it is, that of a plan, or reads its text or dict form.

        Example:
            >>> Policy.of("float32") == Policy.of(Policy.named("float32"))
            True
        """
        return _fields.of(cls, _unplanned(value), PolicyError)

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Reads a name, or `key=value` pairs separated by commas, or a name and what differs.

        A text that ends in `.toml` is the path of a plan's file, which is read.

        Example:
            >>> policy = Policy.parse("mixed_bfloat16, rules=torch-2.13 + softmax=keep")
            >>> policy.rules.base
            'torch-2.13'
        """
        if not isinstance(text, str):
            raise PolicyError(f"Policy needs a text, got {text!r}. Write 'mixed_bfloat16'.")
        planned = _unplanned(text)
        if isinstance(planned, Policy):
            return planned
        first, *rest = split(text)
        start, rest = (cls(), [first, *rest]) if "=" in first else (cls.named(first), rest)
        return start.with_(**pairs(rest, _fields.names(cls), PolicyError, f"The policy {text!r}"))

    def with_(self, **changes: Any) -> "Policy":
        """Returns a policy that differs in the given fields.

        Args:
            changes: The fields; `rules` and `scale` may be given in their text form.

        Example:
            >>> Policy().with_(scale="static(1024.0)").scale.kind
            'static'
        """
        return dataclasses.replace(
            self, **_with_values(_fields.checked(Policy, changes, PolicyError))
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy as plain data.

        Example:
            >>> Policy().to_dict()["compute_dtype"]
            'float16'
        """
        return _fields.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """Returns the policy of a dict that `to_dict` made.

        Example:
            >>> Policy.from_dict({"compute_dtype": "bfloat16", "scale": "none"}).scale.kind
            'none'
        """
        return cls(**_with_values(_fields.checked(cls, data, PolicyError)))

    def __str__(self) -> str:
        for name, policy in _NAMED.items():
            if policy == self:
                return name
        return ", ".join(f"{name}={getattr(self, name)}" for name in _fields.names(self))


def _unplanned(value: object) -> object:
    from halfstep.core._plan import plan_of  # of which a policy is a part

    plan = None if isinstance(value, Policy) else plan_of(value)
    return value if plan is None else plan.policy


def _suggestion(name: object) -> str:
    bare = str(name).strip().lower().rpartition(".")[2]
    return suggestion(_SHORT.get(bare, name), (*_NAMED, AUTO))


_AUTO = (
    "Policy needs dtypes that are known, got 'auto', which stands for those that a device is fast "
    "in. Write it where a model or a device is: in prepare, set_global_policy, autocast or "
    "--policy, and alone; what they then say that it chose can be written anywhere."
)


_VALUES: dict[str, type[Rules] | type[LossScale]] = {"rules": Rules, "scale": LossScale}


def _with_values(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes with the text and dict forms of rules and scale read."""
    return {k: _VALUES[k].of(v) if k in _VALUES else v for k, v in changes.items()}


def _check_value(name: str, value: object) -> None:
    kind = _VALUES[name]
    if not isinstance(value, kind):
        raise PolicyError(
            f"Policy needs {name} to be a {kind.__name__}, got {value!r}."
            f" Write {kind.__name__}.of({value!r})."
        )


_NAMED = {
    "float32": Policy(compute_dtype="float32", scale=LossScale.none()),
    "mixed_float16": Policy(),
    "mixed_bfloat16": Policy(compute_dtype="bfloat16", scale=LossScale.none()),
}

_SHORT = {
    "bf16": "mixed_bfloat16",
    "bfloat16": "mixed_bfloat16",
    "fp16": "mixed_float16",
    "f16": "mixed_float16",
    "float16": "mixed_float16",
    "half": "mixed_float16",
    "amp": "mixed_float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "full": "float32",
}
