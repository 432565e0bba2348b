"""By which rules a program is gone through."""

import difflib
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from halfstep.core import Policy, Rule, Rules
from halfstep.errors import PolicyError, RefusedOperationError, RuleError
from halfstep.jax._interpret._values import Value
from halfstep.jax._ops import FAMILY_OF, OPERATIONS, operation_name
from halfstep.jax._private import scope

# As in the other front-ends, devices are called by what drives them.
_DEVICES = {"gpu": "cuda"}
_SPEAKS = re.compile(r"lax::\w+")


@dataclass(frozen=True)
class Decision:
    """What was done with an operation, and why.

    Args:
        action: What the rules say, or "as written" where they have no say.
        reason: Why, in a sentence.
        dtype: What it ran in, None for what arrived.
    """

    action: str
    reason: str
    dtype: Any = None


Note = Callable[[Any, str, Sequence[Value], Sequence[Value], Decision], None]


@dataclass(frozen=True)
class Context:
    """By which rules a program is gone through.

    Args:
        rules: The rules.
        compute_dtype: What `lower` casts to.
        device: The device type that rules may be limited to.
        path: The dotted path of the module around, where rules are limited by it.
        scaled: Whether gradients may be scaled where it runs.
        note: Who is told of each operation, None for nobody.
        twice: Whether to tell of what was told of, or is part of a derivative.
    """

    rules: Rules
    compute_dtype: Any
    device: str
    path: str = ""
    scaled: bool = False
    note: Note | None = field(default=None, compare=False)
    twice: bool = False

    def at(self, equation: Any) -> str:
        """Returns the dotted path of the module in which an equation stands."""
        return ".".join(filter(None, (self.path, scope(equation))))

    def inside(self, equation: Any) -> "Context":
        """Returns the context of what stands inside an equation."""
        if self.note is None and not _by_path(self.rules):
            return self
        return replace(self, path=self.at(equation))

    def quiet(self) -> "Context":
        """Returns the same rules, told to nobody, unless all is to be told."""
        return self if self.twice else replace(self, note=None)

    def rule(self, equation: Any, name: str) -> Rule | None:
        """Returns the rule that decides about an operation.

        Raises:
            RefusedOperationError: The rules refuse it.
        """
        path = self.at(equation) if _by_path(self.rules) else ""
        dtype = np.dtype(self.compute_dtype).name
        rule = _find(self.rules, name, path, self.device, dtype)
        if rule is not None and rule.action == "refuse":
            raise RefusedOperationError(
                f"The rules refuse {operation_name(name)} in {dtype}: {rule.reason}"
            )
        return rule


def context_of(policy: Policy) -> Context:
    """Returns by which rules a policy lets programs run.

    Raises:
        PolicyError: Its rules say nothing about JAX.
        RuleError: One of its rules names an operation that is not known.
    """
    _check_rules(policy.rules)
    platform = jax.default_backend()
    device = _DEVICES.get(platform, platform)
    return Context(policy.rules, jax.numpy.dtype(policy.compute_dtype), device)


@functools.lru_cache(maxsize=4096)
def _find(rules: Rules, name: str, path: str, device: str, dtype: str) -> Rule | None:
    family = FAMILY_OF.get(name, "")
    return rules.find(operation_name(name), family, path=path, device=device, dtype=dtype)


@functools.lru_cache(maxsize=256)
def _by_path(rules: Rules) -> bool:
    return any(rule.where for rule in rules.rows)


@functools.lru_cache(maxsize=256)
def _check_rules(rules: Rules) -> None:
    """Refuses rules of which none could ever apply, and a rule that never could."""
    for rule in rules.edits:
        name = rule.target.removeprefix("lax::")
        if name != rule.target and name not in OPERATIONS:
            raise RuleError(
                f"Rules need an operation that halfstep.jax knows, got {rule.target!r}."
                f"{_meant(name)} What it does not know runs as it is written."
            )
        if rule.device in _DEVICES:
            raise RuleError(
                f"A rule needs device= as all front-ends call it, got device={rule.device} for"
                f" {rule.target!r}. Write device={_DEVICES[rule.device]}."
            )
    if rules.rows and not any(_speaks(rule.target) for rule in rules.rows):
        raise PolicyError(
            f"halfstep.jax needs rules about families or lax:: operations, got {rules.base!r},"
            " whose rows name operations of another framework. Write rules=halfstep-1."
        )


def _meant(name: str) -> str:
    longer = sorted(each for each in OPERATIONS if each.startswith(f"{name}_"))
    near = longer or difflib.get_close_matches(name, OPERATIONS, n=1)
    return f" Did you mean 'lax::{near[0]}'?" if near else ""


def _speaks(target: str) -> bool:
    return "::" not in target or _SPEAKS.fullmatch(target) is not None
