"""Chooses a policy for a device from what it was seen to be fast in."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from halfstep.core._auto_name import AUTO
from halfstep.core._policy import Policy
from halfstep.core._rules import Rules
from halfstep.errors import ReportError

Size = Literal["small", "large"]

# What a format has to save of float32's time: regions, and casts at their edges, cost some of it.
_GAIN = 0.9
# What it may take more of it, where it saves memory and casts.
_MARGIN = 1.05
# The one that needs no loss scale first: the other has to be faster by as much as is a gain.
_FORMATS = {"bfloat16": Policy.named("mixed_bfloat16"), "float16": Policy.named("mixed_float16")}
# Which rules follow from what was measured.
_TARGETS: dict[str, tuple[str, ...]] = {
    "matmul": ("matmul", "recurrent"),
    "convolution": ("convolution",),
    "attention": ("attention",),
    "normalisation": ("normalisation", "softmax"),
}
_SIZES = get_args(Size)
# The others take what arrives, so there would be no reason to begin with a low format.
_WORTHY = ("matmul", "convolution", "attention")


@dataclass(frozen=True)
class FamilyTimes:
    """How long an operation takes on a device, forward and backward, with the casts of its weights.

    Args:
        family: Its family; `normalisation` stands for all that is bound by memory.
        size: "small" or "large".
        float32: The seconds in float32; inf where it could not be measured, as in the others.
        bfloat16: The seconds in bfloat16.
        float16: The seconds in float16.

    Example:
        >>> FamilyTimes("matmul", "large", 2.0, 1.0, 60.0).ratio("float16")
        30.0
    """

    family: str
    size: str
    float32: float = math.inf
    bfloat16: float = math.inf
    float16: float = math.inf

    def __post_init__(self) -> None:
        seconds = self.float32, self.bfloat16, self.float16
        if self.family in _TARGETS and self.size in _SIZES and all(each >= 0.0 for each in seconds):
            return
        raise ReportError(
            f"FamilyTimes needs a family among {', '.join(_TARGETS)}, a size among "
            f"{', '.join(_SIZES)} and seconds >= 0, got {self.family!r}, {self.size!r} and "
            f"{seconds}. Delete the file that it was read from: it is measured again."
        )

    def ratio(self, dtype: str) -> float:
        """Returns the time in a format over that in float32, inf where it is not known.

        Example:
            >>> FamilyTimes("matmul", "large").ratio("bfloat16")
            inf
        """
        ratio = float(getattr(self, dtype)) / self.float32 if self.float32 else math.inf
        return math.inf if math.isnan(ratio) or math.isinf(self.float32) else ratio


@dataclass(frozen=True)
class Choice:
    """A policy, and why it is the one.

    Args:
        policy: The policy.
        why: One line.
    """

    policy: Policy
    why: str


def choose(
    times: Sequence[FamilyTimes], device: str, size: Size = "large", *, whole: bool = False
) -> Choice:
    """Returns the policy that is fastest on a device, float32 where nothing is gained.

    What is slower in the format of the policy stays in float32.

    Args:
        times: What was measured there.
        device: What it is called.
        size: What the policy is for.
        whole: Whether there can be no rules, so that a format that is slower in anything is out.

    Example:
        >>> times = [FamilyTimes("matmul", "large", 2.0, 1.0, 60.0),
        ...     FamilyTimes("attention", "large", 1.0, 2.5, 7.0)]
        >>> choice = choose(times, "AMD EPYC")
        >>> print(choice.policy.rules)
        halfstep-1 + attention=full "Measured on AMD EPYC: 2.50 times as long in bfloat16 as in \
float32."
        >>> print(choice.why)
        auto chose mixed_bfloat16 with attention in float32 on AMD EPYC: of the time of float32, \
bfloat16 takes 0.50 in matmul, 2.50 in attention; float16 takes 30.00 in matmul, 7.00 in attention.
        >>> print(choose(times, "AMD EPYC", whole=True).policy)
        float32
    """
    ratios = {
        dtype: {each.family: each.ratio(dtype) for each in times if each.size == size}
        for dtype in _FORMATS
    }
    dtype = _best(ratios, whole)
    policy = _ruled(dtype, ratios[dtype], device) if dtype else Policy.named("float32")
    return Choice(policy, _why(policy, ratios, device))


def _best(ratios: Mapping[str, Mapping[str, float]], whole: bool) -> str:
    """Returns the format that gains most, "" where none does."""
    scores = {d: _score(found) for d, found in ratios.items() if _is_worth_it(found, whole)}
    first, *others = [*scores, ""]
    faster = [each for each in others if each and scores[each] <= _GAIN * scores[first]]
    return min(faster, key=scores.__getitem__, default=first)


def _is_worth_it(ratios: Mapping[str, float], whole: bool) -> bool:
    if whole and any(ratio > _MARGIN for ratio in ratios.values()):
        return False
    return any(ratios.get(family, math.inf) <= _GAIN for family in _WORTHY)


def _score(ratios: Mapping[str, float]) -> float:
    """Returns the geometric mean of what is left of float32's time where the slow stays there."""
    left = [max(min(ratio, 1.0), 1e-9) for ratio in ratios.values()]
    return math.exp(sum(map(math.log, left)) / len(left))


def _ruled(dtype: str, ratios: Mapping[str, float], device: str) -> Policy:
    policy, rules = _FORMATS[dtype], Rules()
    for family, ratio in ratios.items():
        for target in _TARGETS[family] if ratio > _MARGIN else ():
            rules = rules.with_rule(target, "full", reason=_reason(device, dtype, ratio))
    return policy.with_(rules=rules)


def _reason(device: str, dtype: str, ratio: float) -> str:
    if math.isinf(ratio):
        return f"It could not be measured in {dtype} on {device}."
    return f"Measured on {device}: {ratio:.2f} times as long in {dtype} as in float32."


def _why(policy: Policy, ratios: Mapping[str, Mapping[str, float]], device: str) -> str:
    found = "; ".join(_takes(*each) for each in ratios.items() if each[1]) or "nothing was measured"
    gained = "" if policy.compute_dtype != "float32" else ", where no other is faster"
    return f"{AUTO} chose {brief(policy)} on {device}{gained}: of the time of float32, {found}."


def _takes(dtype: str, ratios: Mapping[str, float]) -> str:
    known = [f"{ratio:.2f} in {family}" for family, ratio in ratios.items() if math.isfinite(ratio)]
    unknown = [family for family, ratio in ratios.items() if math.isinf(ratio)]
    parts = [f"takes {', '.join(known)}"] if known else []
    parts += [f"could not be measured in {', '.join(unknown)}"] if unknown else []
    return f"{dtype} {' and '.join(parts)}"


def brief(policy: Policy) -> str:
    """Returns what a policy that was chosen is called: its name, and what stays in float32.

    Example:
        >>> brief(Policy.parse("mixed_bfloat16, rules=halfstep-1 + attention=full + softmax=full"))
        'mixed_bfloat16 with attention, softmax in float32'
    """
    name = str(policy.with_(rules=Rules()))
    kept = ", ".join(_targets(policy))
    return f"{name} with {kept} in float32" if kept else name


def _targets(policy: Policy) -> Iterator[str]:
    return (each.target for each in policy.rules.edits)
