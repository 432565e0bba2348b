"""Chooses a policy for a device from what it was seen to be fast in."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from halfstep.core import _fields
from halfstep.core._auto_name import AUTO
from halfstep.core._policy import Policy
from halfstep.core._rules import Rules
from halfstep.errors import ReportError

Size = Literal["small", "large"]

# What a format has to save of float32's time: regions, and casts at their edges, cost some of it.
_GAIN = 0.9
# What an operation may take more than in float32, where that saves memory and casts.
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
# For the sake of these there is a low format.
_WORTHY = ("matmul", "convolution", "attention")
# What there is some of around each of them, and takes what arrives.
_AROUND = "normalisation"


@dataclass(frozen=True)
class FamilyTimes:
    """How long an operation takes on a device, forward and backward, with the casts of its weights.

    Args:
        family: Its family; `normalisation` stands for all that is bound by memory.
        size: "small" or "large".
        float32: The seconds in float32; inf where it could not be measured, as in the others.
        bfloat16: The seconds in bfloat16.
        float16: The seconds in float16.
        full_bfloat16: The seconds in float32 of what arrives in bfloat16 and leaves in it.
        full_float16: The seconds in float32 of what arrives in float16 and leaves in it.

    Example:
        >>> FamilyTimes("matmul", "large", 2.0, 1.0, 60.0).ratio("float16")
        30.0
    """

    family: str
    size: str
    float32: float = math.inf
    bfloat16: float = math.inf
    float16: float = math.inf
    full_bfloat16: float = math.inf
    full_float16: float = math.inf

    def __post_init__(self) -> None:
        seconds = tuple(getattr(self, name) for name in _fields.names(self)[2:])
        if self.family in _TARGETS and self.size in _SIZES and all(each > 0.0 for each in seconds):
            return
        raise ReportError(
            f"FamilyTimes needs a family among {', '.join(_TARGETS)}, a size among "
            f"{', '.join(_SIZES)} and seconds > 0, got {self.family!r}, {self.size!r} and "
            f"{seconds}. Delete the file that it was read from: it is measured again."
        )

    def ratio(self, dtype: str) -> float:
        """Returns the time in a format over that in float32, inf where it is not known.

        Example:
            >>> FamilyTimes("matmul", "large").ratio("bfloat16")
            inf
        """
        return math.inf if math.isinf(self.float32) else float(getattr(self, dtype)) / self.float32

    def in_full(self, dtype: str) -> float:
        """Returns the time that is left where it stays in float32, casts included if known.

        Example:
            >>> FamilyTimes("attention", "large", 1.0, 1.2, full_bfloat16=1.3).in_full("bfloat16")
            1.3
        """
        full = float(getattr(self, f"full_{dtype}"))
        return self.float32 if math.isinf(full) else max(full, self.float32)

    def is_slow(self, dtype: str) -> bool:
        """Returns whether it is better off in float32 than in a format.

        Example:
            >>> FamilyTimes("attention", "large", 1.0, 1.2).is_slow("bfloat16")
            True
        """
        if self.ratio(dtype) <= _MARGIN:
            return False
        # Around it there is more that would then run in float32, too: it has to be worth it.
        full = float(getattr(self, f"full_{dtype}"))
        return math.isinf(full) or self.in_full(dtype) <= _GAIN * float(getattr(self, dtype))

    def best(self, dtype: str) -> float:
        """Returns the time that it takes in the policy of a format.

        Example:
            >>> FamilyTimes("attention", "large", 1.0, 2.5).best("bfloat16")
            1.0
        """
        return self.in_full(dtype) if self.is_slow(dtype) else float(getattr(self, dtype))


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
    found = [each for each in times if each.size == size]
    dtype = _best(found, whole)
    policy = _FORMATS[dtype] if dtype else Policy.named("float32")
    policy = policy if whole or not dtype else _ruled(policy, found, device)
    return Choice(policy, _why(policy, found, device))


def _best(times: Sequence[FamilyTimes], whole: bool) -> str:
    """Returns the format that gains most, "" where none does."""
    scores = {d: _score(times, d, whole) for d in _FORMATS if _is_worth_it(times, d, whole)}
    first, *others = [*scores, ""]
    faster = [each for each in others if each and scores[each] <= _GAIN * scores[first]]
    return min(faster, key=scores.__getitem__, default=first)


def _is_worth_it(times: Sequence[FamilyTimes], dtype: str, whole: bool) -> bool:
    if any(math.isinf(each.float32) for each in times):
        return False  # there was no time to know enough
    worthy = [each for each in times if each.family in _WORTHY]
    if whole and any(each.ratio(dtype) > _MARGIN for each in worthy):
        return False
    around = [each for each in times if each.family == _AROUND]
    return any(
        each.ratio(dtype) <= _GAIN and _pays([each, *around], dtype, whole) for each in worthy
    )


def _pays(times: Sequence[FamilyTimes], dtype: str, whole: bool) -> bool:
    """Returns whether an operation gains what it costs to have something in the format around."""
    return sum(_left(e, dtype, whole) for e in times) <= sum(each.float32 for each in times)


def _score(times: Sequence[FamilyTimes], dtype: str, whole: bool) -> float:
    """Returns the geometric mean of what is left of float32's time."""
    left = [_left(each, dtype, whole) / each.float32 for each in times]
    return math.exp(sum(map(math.log, left)) / len(left))


def _left(times: FamilyTimes, dtype: str, whole: bool) -> float:
    return float(getattr(times, dtype)) if whole else times.best(dtype)


def _ruled(policy: Policy, times: Sequence[FamilyTimes], device: str) -> Policy:
    dtype, rules = policy.compute_dtype, Rules()
    for each in times:
        for target in _TARGETS[each.family] if each.is_slow(dtype) else ():
            rules = rules.with_rule(target, "full", reason=_reason(each, dtype, device))
    return policy.with_(rules=rules)


def _reason(times: FamilyTimes, dtype: str, device: str) -> str:
    ratio = times.ratio(dtype)
    if math.isinf(ratio):
        return f"It could not be measured in {dtype} on {device}."
    return f"Measured on {device}: {ratio:.2f} times as long in {dtype} as in float32."


def _why(policy: Policy, times: Sequence[FamilyTimes], device: str) -> str:
    found = "; ".join(_takes(dtype, times) for dtype in _FORMATS)
    measured = f"of the time of float32, {found}" if times else "nothing was measured"
    gained = "" if policy.compute_dtype != "float32" else ", where no other is faster"
    return f"{AUTO} chose {brief(policy)} on {device}{gained}: {measured}."


def _takes(dtype: str, times: Sequence[FamilyTimes]) -> str:
    ratios = {each.family: each.ratio(dtype) for each in times}
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
