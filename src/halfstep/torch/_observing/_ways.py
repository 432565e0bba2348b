"""How a step computes in low precision, and how that is written with other settings."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from halfstep.core import Policy, Rule, Rules
from halfstep.torch._engine import _state
from halfstep.torch._engine._paths import _unwrapped
from halfstep.torch._observing._formats import Asked
from halfstep.torch._region import Region
from halfstep.torch._regions._forward import forward_of

_IN_PLACE = {
    False: "  # in place of the one around the model",
    True: "  # of halfstep.torch, in place of torch.autocast",
}


@dataclass(frozen=True)
class Way:
    """How a step computes in low precision: in a region, in an autocast, or neither.

    Args:
        region: The region, None without one.
        path: The path of the module that is the region.
        asked: What the first autocast was asked for, None without one.
    """

    region: Region | None = None
    path: str = ""
    asked: Asked | None = None

    @property
    def native(self) -> bool:
        """Whether it is PyTorch's own autocast."""
        return self.region is None and self.asked is not None and self.asked.native

    def below(self, path: str) -> str | None:
        """Returns a module's path as the rules see it, None for one that they do not reach."""
        if self.region is None or not self.path:
            return path
        inside = f"{path}.".startswith(f"{self.path}.")
        return path[len(self.path) + 1 :] if inside else None

    def with_rules(self, edits: Sequence[Rule]) -> str:
        """Returns what makes rows take effect, empty where there are no rules."""
        if self.region is None and self.asked is None:
            return ""
        text = _rules_text(self._rules, edits)
        if self.region is not None:
            policy = _policy_text(self.region.policy.with_(rules=Rules()))
            return f"{text}\n{self._prepared(f'{policy}.with_(rules=rules)')}"
        return f"{text}\n{self._autocast(', rules=rules')}"

    def as_ours(self) -> str:
        """Returns what takes the place of PyTorch's own autocast."""
        return self._autocast("")

    def in_bfloat16(self) -> str:
        """Returns what computes in bfloat16, empty where that is up to the model."""
        if self.region is not None:
            scale = "" if self.region.policy.scale.kind != "static" else ", scale=none"
            return self._prepared(f'"mixed_bfloat16{scale}"')
        if self.asked is None:
            return ""
        name = "torch.autocast" if self.native else "autocast"
        return f'lower = {name}("{self.asked.device_type}", dtype=torch.bfloat16)'

    def at_scale(self, scale: float) -> str:
        """Returns what scales the loss by a number."""
        if self.region is not None:
            kind = "static" if self.region.policy.scale.kind == "static" else "dynamic"
            policy = self.region.policy.with_(scale=f"{kind}(init_scale={scale!r})")
            return self._prepared(_policy_text(policy))
        return f"scaler = GradScaler(init_scale={scale!r})"

    @property
    def _rules(self) -> Rules:
        if self.region is not None:
            return self.region.policy.rules
        return Rules.parse((self.asked and self.asked.rules) or _state.DEFAULT)

    def _prepared(self, policy: str) -> str:
        if self.region is not None and self.region._automatic:
            return f"set_global_policy({policy})"
        model = f'model.get_submodule("{self.path}")' if self.path else "model"
        return f"region = prepare({model}, optimizer, policy={policy})"

    def _autocast(self, rules: str) -> str:
        assert self.asked is not None
        arguments = f'"{self.asked.device_type}", dtype={self.asked.dtype}{rules}'
        return f"lower = autocast({arguments}){_IN_PLACE[self.native]}"


def way_of(model: nn.Module, asked: Sequence[Asked]) -> Way:
    """Returns how a model computes in low precision.

    Args:
        model: The model.
        asked: What the autocasts were asked for that were entered.
    """
    for path, module in _unwrapped(model).named_modules():
        forward = forward_of(module)
        if forward is not None:
            return Way(forward.region, path)
    return Way(asked=asked[0] if asked else None)


def _rules_text(rules: Rules, edits: Sequence[Rule]) -> str:
    begun = "Rules()" if rules == Rules() else f"Rules.parse({str(rules)!r})"
    lines = []
    for each in edits:
        where = f', where="{each.where}"' if each.where else ""
        arguments = f'"{each.target}", "{each.action}", reason="{each.reason}"{where}'
        lines.append(f"rules = {begun}.with_rule({arguments})")
        begun = "rules"
    return "\n".join(lines)


def _policy_text(policy: Policy) -> str:
    """Returns a policy as a named one and what differs."""
    text = min((_difference(name, policy) for name in Policy.names()), key=len)
    return f'Policy.{"parse" if "," in text else "named"}("{text}")'


def _difference(name: str, policy: Policy) -> str:
    fields, own = policy.to_dict(), Policy.named(name).to_dict()
    changed = [field for field in fields if fields[field] != own[field]]
    return ", ".join([name, *(f"{field}={getattr(policy, field)}" for field in changed)])
