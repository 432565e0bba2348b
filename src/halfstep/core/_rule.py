"""One row of the rules, and the words that rows are made of."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halfstep.core import _fields
from halfstep.core._formats import COMPUTE_DTYPES, dtype_suggestion
from halfstep.core._text import suggestion
from halfstep.errors import RuleError

ACTIONS = ("lower", "full", "widest", "keep", "refuse")

FAMILIES = (
    "matmul",
    "convolution",
    "attention",
    "recurrent",
    "normalisation",
    "softmax",
    "reduction",
    "exponential",
    "loss",
    "linear_algebra",
    "fourier",
    "pointwise",
    "indexing",
    "masking",
    "embedding",
    "pooling",
    "interpolation",
)

_OPERATION = re.compile(r"[A-Za-z_]\w*::\w+(\.\w+)?")
_DEVICE = re.compile(r"[a-z]\w*")


@dataclass(frozen=True)
class Rule:
    """What happens to an operation, or to a family of operations, and why.

    Args:
        target: A family such as "softmax", an operation with all of its overloads such as
            "aten::softmax", or one overload such as "aten::softmax.int".
        action: "lower" casts the inputs to the compute dtype, "full" to float32, "widest" to the
            widest one among them; "keep" runs in whatever arrives; "refuse" raises an error.
        reason: Why, in a sentence.
        where: A pattern for the dotted path of the module in which the operation runs, in which
            `*` stands for anything; empty for everywhere.
        device: A device type such as "cpu"; empty for every device.
        dtype: A compute dtype such as "float16"; empty for every one.

    Example:
        >>> Rule("softmax", "full", "Small probabilities matter here.", where="decoder*").action
        'full'
    """

    target: str
    action: str
    reason: str
    where: str = ""
    device: str = ""
    dtype: str = ""

    def __post_init__(self) -> None:
        for name in _fields.names(self):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise RuleError(f"Rule needs {name} to be a text, got {value!r}. Write a string.")
            rule, holds, remedy = _REQUIREMENTS[name]
            if not (holds(value) or (value == "" and name not in _fields.required(self))):
                raise RuleError(f"Rule needs {rule}, got {name}={value!r}.{remedy(value)}")

    @property
    def key(self) -> tuple[str, ...]:
        """What the row speaks about: its target and limits. Two rows of one key contradict.

        Example:
            >>> Rule("softmax", "full", "It sums.", device="cpu").key
            ('softmax', '', 'cpu', '')
        """
        spoken_of = (name for name in _fields.names(self) if name not in ("action", "reason"))
        return tuple(getattr(self, name) for name in spoken_of)

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain data.

        Example:
            >>> Rule("softmax", "full", "It sums.").to_dict()["target"]
            'softmax'
        """
        return _fields.to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Rule":
        """Returns the row of a dict that `to_dict` made; limits may be missing.

        Example:
            >>> row = {"target": "softmax", "action": "full", "reason": "It sums."}
            >>> Rule.from_dict(row) == Rule("softmax", "full", "It sums.")
            True
        """
        return cls(**_fields.checked(cls, data, RuleError))


def _is_target(text: str) -> bool:
    return text in FAMILIES or _OPERATION.fullmatch(text) is not None


def _target_remedy(text: str) -> str:
    if text and "::" not in text and not suggestion(text, FAMILIES):
        return (
            f" Families are {', '.join(FAMILIES)}; an operation has a namespace: 'aten::{text}' in"
            " PyTorch, 'lax::dot_general' and the like in JAX."
        )
    return suggestion(text, FAMILIES) or " Write for example 'softmax' or 'aten::softmax.int'."


Requirement = tuple[str, Callable[[str], bool], Callable[[str], str]]

_REQUIREMENTS: dict[str, Requirement] = {
    "target": ("a family or an operation", _is_target, _target_remedy),
    "action": (
        f"an action among {', '.join(ACTIONS)}",
        lambda text: text in ACTIONS,
        lambda text: suggestion(text, ACTIONS) or " Write for example 'full'.",
    ),
    "reason": (
        "a reason",
        lambda text: bool(text.strip()),
        lambda text: " Say in a sentence why the rule is there.",
    ),
    "where": (
        "a module path pattern without blanks around it",
        lambda text: text == text.strip(),
        lambda text: " Write for example 'decoder.*'.",
    ),
    "device": (
        "a device type without a number",
        lambda text: _DEVICE.fullmatch(text) is not None,
        lambda text: f" Write {text.partition(':')[0].strip().lower() or 'cpu'!r}.",
    ),
    "dtype": (
        f"a compute dtype among {', '.join(COMPUTE_DTYPES)}",
        lambda text: text in COMPUTE_DTYPES,
        dtype_suggestion,
    ),
}
