"""How an operation computes in low precision, and how that is written with other settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from halfstep.core import Policy, Rule, Rules, policy_text, quoted, rules_text
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

    def with_rules(self, edits: Sequence[Rule]) -> str:
        """Returns what makes rows take effect, empty where there are no rules."""
        if self.region is None and self.asked is None:
            return ""
        text = rules_text(self._rules, edits)
        if self.region is not None:
            policy = policy_text(self.region.policy.with_(rules=Rules()))
            return f"{text}\n{self._prepared(f'{policy}.with_(rules=rules)')}"
        return f"{text}\n{self._autocast(', rules=rules')}"

    def as_ours(self) -> str:
        """Returns what takes the place of PyTorch's own autocast."""
        return self._autocast("")

    def in_bfloat16(self) -> str:
        """Returns what computes in bfloat16, empty where that is up to the model."""
        if self.region is not None:
            scale = "" if self.region.policy.scale.kind != "static" else ", scale=none"
            return self._by(f"mixed_bfloat16{scale}")
        if self.asked is None:
            return ""
        name = "torch.autocast" if self.native else "autocast"
        lower = f"lower = {name}({quoted(self.asked.device_type)}, dtype=torch.bfloat16)"
        return f"{lower}  # in place of the one {self.asked.where}"

    def at_scale(self, scale: float) -> str:
        """Returns what scales the loss by a number, empty where it is scaled so already."""
        if self.region is not None:
            kind = "static" if self.region.policy.scale.kind == "static" else "dynamic"
            policy = self.region.policy.with_(scale=f"{kind}(init_scale={scale!r})")
            return "" if policy == self.region.policy else self._prepared(policy_text(policy))
        return f"scaler = GradScaler(init_scale={scale!r})"

    @property
    def _rules(self) -> Rules:
        if self.region is not None:
            return self.region.policy.rules
        return Rules.parse((self.asked and self.asked.rules) or _state.DEFAULT)

    def _by(self, policy: str) -> str:
        """Returns what trains by a policy, empty where that is so already."""
        assert self.region is not None
        in_use = Policy.parse(policy) == self.region.policy
        return "" if in_use else self._prepared(quoted(policy))

    def _prepared(self, policy: str) -> str:
        assert self.region is not None
        policy = f"policy = {policy}"
        if self.region._automatic:
            return f"{policy}\nset_global_policy(policy)"
        model = f"model.get_submodule({quoted(self.path)})" if self.path else "model"
        which = f"  # model: {self.root}" if self.root else ""
        if not which and any(True for _ in self.region._attached()):
            which = f"  # in place of how the {type(self.region._module()).__name__} was prepared"
        return f"{policy}\nregion = prepare({model}, optimizer, policy=policy){which}"

    def _autocast(self, rules: str) -> str:
        assert self.asked is not None
        arguments = f"{quoted(self.asked.device_type)}, dtype={self.asked.dtype}{rules}"
        instead = _INSTEAD[self.native].format(where=self.asked.where)
        return f"lower = autocast({arguments}){instead}"
