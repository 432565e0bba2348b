"""How an operation computes in low precision, and how that is written with other settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from halfstep.core import Change, Policy, Rule, Rules, policy_words, quoted
from halfstep.torch._engine import _state

if TYPE_CHECKING:
    from halfstep.torch._region import Region

_INSTEAD = {
    False: "  # in place of the one {where}",
    True: "  # of halfstep.torch, in place of torch.autocast {where}",
}


class Asked(NamedTuple):
    """What an autocast was asked for.

    Args:
        native: Whether it is PyTorch's own.
        device_type: Where it casts.
        dtype: The compute dtype.
        rules: The text of its rules; PyTorch's own has none.
        source: The line that it was entered in, as "file:line"; empty where it is not known.
    """

    native: bool
    device_type: str
    dtype: torch.dtype
    rules: str
    source: str = ""

    @property
    def where(self) -> str:
        """Which autocast it is, in words."""
        return f"in {self.source}" if self.source else "around the model"


@dataclass(frozen=True)
class Way:
    """How an operation computes in low precision: in a region, in an autocast, or neither.

    Args:
        region: The innermost region, None without one.
        root: The name of the model that the region is in; empty for the model that is looked at.
        path: The path of the module that is the region, in that model.
        asked: What the innermost autocast was asked for, None without one.
    """

    region: "Region | None" = None
    root: str = ""
    path: str = ""
    asked: Asked | None = None

    @property
    def native(self) -> bool:
        """Whether it is PyTorch's own autocast."""
        return self.region is None and self.asked is not None and self.asked.native

    def below(self, path: str) -> str | None:
        """Returns a path below that of the region, None for one that is not."""
        if not self.path:
            return path
        inside = f"{path}.".startswith(f"{self.path}.")
        return path[len(self.path) + 1 :] if inside else None

    def with_rules(self, edits: Sequence[Rule]) -> Change | None:
        """Returns what makes rows take effect, None where there are no rules."""
        if self.region is None and self.asked is None:
            return None
        if self.region is None:
            return self._autocast(", rules=rules", rules=tuple(edits))
        return self._prepared(rules=tuple(edits))

    def as_ours(self) -> Change:
        """Returns what takes the place of PyTorch's own autocast."""
        return self._autocast("")

    def in_bfloat16(self) -> Change | None:
        """Returns what computes in bfloat16, None where that is so or up to the model."""
        if self.region is not None:
            scale = "" if self.region.policy.scale.kind != "static" else ", scale=none"
            wide = f"mixed_bfloat16{scale}"
            in_use = Policy.parse(wide) == self.region.policy
            return None if in_use else self._prepared(instead=wide)
        if self.asked is None:
            return None
        name = "torch.autocast" if self.native else "autocast"
        lower = f"lower = {name}({quoted(self.asked.device_type)}, dtype=torch.bfloat16)"
        use = f"{lower}  # in place of the one {self.asked.where}"
        return Change(use, self._of, instead="mixed_bfloat16")

    def at_scale(self, scale: float) -> Change | None:
        """Returns what scales the loss by a number, None where it is scaled so already."""
        if self.region is None:
            return Change(f"scaler = GradScaler(init_scale={scale!r})", "scaler", scale=repr(scale))
        kind = "static" if self.region.policy.scale.kind == "static" else "dynamic"
        text = f"{kind}(init_scale={scale!r})"
        policy = self.region.policy
        return None if policy.with_(scale=text) == policy else self._prepared(scale=text)

    @property
    def _of(self) -> str:
        """What is changed: the policy of a region, or an autocast."""
        if self.region is None:
            return f"autocast {self.asked and self.asked.where}"
        own = "" if self.region._automatic else f"{self.root} {self.path}"
        return f"policy {own}".strip()

    @property
    def _rules(self) -> Rules:
        if self.region is not None:
            return self.region.policy.rules
        return Rules.parse((self.asked and self.asked.rules) or _state.DEFAULT)

    def _prepared(self, **changed: Any) -> Change:
        assert self.region is not None
        use = "set_global_policy(policy)" if self.region._automatic else self._preparing
        return Change(use, self._of, policy_words(self.region.policy), **changed)

    @property
    def _preparing(self) -> str:
        assert self.region is not None
        model = f"model.get_submodule({quoted(self.path)})" if self.path else "model"
        which = f"  # model: {self.root}" if self.root else ""
        if not which and any(True for _ in self.region._attached()):
            which = f"  # in place of how the {type(self.region._module()).__name__} was prepared"
        return f"region = prepare({model}, optimizer, policy=policy){which}"

    def _autocast(self, setting: str, **changed: Any) -> Change:
        assert self.asked is not None
        arguments = f"{quoted(self.asked.device_type)}, dtype={self.asked.dtype}{setting}"
        instead = _INSTEAD[self.native].format(where=self.asked.where)
        base = policy_words(Policy.named("mixed_float16").with_(rules=self._rules))
        return Change(f"lower = autocast({arguments}){instead}", self._of, base, **changed)
