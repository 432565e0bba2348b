"""What a comparison means, in words."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from halfstep.launch import UNSCALED, why_ineffective
from halfstep.run._curves import LEVEL, Difference, curves_apart
from halfstep.run._summary import Summary, mean, spread
from halfstep.run._units import DIGITS, unit_of

_ALIKE = 0.05  # a difference in speed or memory below this is not worth a word
_MANY_SKIPS = 0.1
_ENOUGH_SEEDS = 3
_LOSS = "loss"
_FINAL_LOSS = "final loss"
_UNKNOWN = (
    "agreement unknown: neither a loss nor a metric was seen; report one with halfstep.metric"
)
_TINY = f"none in {DIGITS} digits"
_BETTER_HIGH = ("acc", "f1", "auc", "precision", "recall", "bleu", "psnr", "reward")
_BETTER_LOW = ("loss", "error", "perplexity", "ppl", "mae", "mse", "rmse", "wer", "cer", "fid")


@dataclass(frozen=True)
class Agreement:
    """How one quantity of a policy compares with the first policy's.

    Args:
        text: The comparison in words.
        worse: Whether it is worse by more than chance explains.
    """

    text: str
    worse: bool = False


def verdict(first: Summary, other: Summary) -> str:
    """Returns what there is to say for and against a policy, compared with the first one."""
    if not other.trained:
        return _nothing_to_judge(other)
    if not first.trained:
        nothing = f"nothing to compare with: {first.policy} gave no result"
        return "; ".join([nothing, *_remarks(other)])
    if other.ineffective:
        return f"did not take effect, because {why_ineffective(other.trained[0])}"
    if first.ineffective:
        why = why_ineffective(first.trained[0])
        return f"nothing to compare with: {first.policy} did not take effect, because {why}"
    found = list(agreements(first, other))
    costs = f"{_speed(first, other)}, {_saved(first, other)}"
    remarks = [*_broken_losses(first), *_remarks(other)]
    agreed = "; ".join([agreement.text for agreement in found] + remarks)
    if any(agreement.worse for agreement in found):
        return f"keep {first.policy}: {agreed}; {costs}"
    if _gains_nothing(first, other):
        reason = f"{other.policy} is {_speed(first, other)}{_saves_nothing(first, other)}"
        return f"no gain on this machine: keep {first.policy}, because {reason}; {agreed}"
    return f"{costs}; {agreed}"


def agreements(first: Summary, other: Summary) -> Iterator[Agreement]:
    """Yields the comparison of each metric, and of the final loss if it is all there is or bad."""
    shared = [name for name in first.metric_names if name in other.metric_names]
    for name in shared:
        yield agreement(name, first.metric(name), other.metric(name), first.policy)
    firsts, others = first.last_losses, other.last_losses
    if not shared and not (firsts and others):
        yield Agreement(_UNKNOWN)
    told = shared and all(map(math.isfinite, firsts + others))
    if firsts and others and not told:
        yield agreement(_FINAL_LOSS, firsts, others, first.policy)
    losses = ([run.losses for run in each.trained] for each in (first, other))
    found = curves_apart(*losses)
    if found is not None:
        yield _curves(found)


def agreement(
    name: str, firsts: Sequence[float], others: Sequence[float], first_policy: str
) -> Agreement:
    """Judges a difference of means by how much the first policy's own seeds differ.

    Args:
        name: What the values are.
        firsts: The first policy's values, one per seed.
        others: The values of the policy that is judged.
        first_policy: The first policy's name.

    Example:
        >>> agreement("accuracy", [0.970, 0.972, 0.971], [0.970, 0.971, 0.972], "float32").text
        'accuracy within run-to-run noise (0.2 points over 3 seeds)'
    """
    bad_firsts, bad_others = _count_nonfinite(firsts), _count_nonfinite(others)
    if bad_firsts:
        here = f"{name} is not finite in {bad_firsts} of {len(firsts)} runs of {first_policy}"
        also = f" and in {bad_others} of {len(others)} here" if bad_others else ""
        return Agreement(f"nothing to compare with: {here}{also}")
    if bad_others:
        return Agreement(f"{name} is not finite in {bad_others} of {len(others)} runs", worse=True)
    difference, noise = _mean(others) - _mean(firsts), spread(firsts)
    unit = unit_of(name, firsts, others)
    by = unit(abs(difference))
    if len(firsts) < 2:
        return Agreement(_without_noise(name, difference, by))
    if noise == 0:
        return Agreement(_without_spread(name, difference, by, first_policy))
    limits = f"({unit(noise) or _TINY} over {len(firsts)} seeds)"
    if abs(difference) <= noise:
        return Agreement(f"{name} within run-to-run noise {limits}")
    if not by:
        return Agreement(_same(name, difference))
    direction = _direction(name, difference)
    return Agreement(
        f"{name} {direction} by {by}, beyond run-to-run noise {limits}", direction != "better"
    )


def _curves(found: Difference) -> Agreement:
    """Judges loss curves by what chance makes of them."""
    limits = f"(p = {found.chance:.2g}, {len(found.firsts)} seeds)"
    if found.chance > LEVEL:
        return Agreement(f"loss curves no further apart than by chance {limits}")
    change = _mean(found.others) - _mean(found.firsts)
    by = unit_of(_LOSS, found.firsts, found.others)(abs(change)) or _TINY
    direction = _direction(_LOSS, change)
    text = f"{_LOSS} {direction} by {by} from {found.place} of the run, beyond chance {limits}"
    return Agreement(text, direction != "better")


def _without_noise(name: str, difference: float, by: str) -> str:
    advice = f"noise unknown: run with --seeds {_ENOUGH_SEEDS}"
    if not by:
        return f"{_same(name, difference)} ({advice})"
    return f"{name} {_direction(name, difference)} by {by} ({advice})"


def _without_spread(name: str, difference: float, by: str, first_policy: str) -> str:
    if not by:
        return _same(name, difference)
    return (
        f"{name} {_direction(name, difference)} by {by} (noise unknown: every seed gives "
        f"{first_policy} the same {name}; the script may seed itself)"
    )


def _same(name: str, difference: float) -> str:
    return f"the same {name}" + (f" to {DIGITS} digits" if difference else "")


def _direction(name: str, difference: float) -> str:
    words = name.lower()
    up = difference > 0
    if any(word in words for word in _BETTER_LOW):
        return "worse" if up else "better"
    if any(word in words for word in _BETTER_HIGH):
        return "better" if up else "worse"
    return "higher" if up else "lower"


def _nothing_to_judge(other: Summary) -> str:
    if other.failed:
        bad = _count_nonfinite([run.last_loss or 0.0 for run in other.failed])
        loss = f", with a loss that is not finite in {bad}" if bad else ""
        return f"failed in {len(other.failed)} of {len(other.runs)} runs{loss}"
    return "no training step was seen"


def _gains_nothing(first: Summary, other: Summary) -> bool:
    speed = _ratio(other.steps_per_second, first.steps_per_second)
    saved = _ratio(other.saved_bytes, first.saved_bytes)
    is_faster = speed is None or speed >= 1 + _ALIKE  # for all that is known
    return not is_faster and (saved is None or saved > 1 - _ALIKE)


def _speed(first: Summary, other: Summary) -> str:
    ratio = _ratio(other.steps_per_second, first.steps_per_second)
    if ratio is None:
        return "speed unknown (too few steps)"
    if abs(ratio - 1) < _ALIKE:
        return "as fast"
    return f"{ratio:.2g}x faster" if ratio > 1 else f"{1 / ratio:.2g}x slower"


def _saved(first: Summary, other: Summary) -> str:
    ratio = _ratio(other.saved_bytes, first.saved_bytes)
    if ratio is None:
        return "bytes saved for backward unknown"
    if abs(ratio - 1) < _ALIKE:
        return "as much saved for backward"
    return f"{abs(ratio - 1):.0%} {'less' if ratio < 1 else 'more'} saved for backward".replace(
        "%", " %"
    )


def _saves_nothing(first: Summary, other: Summary) -> str:
    if other.saved_bytes is None or first.saved_bytes is None:
        return ""
    more = other.saved_bytes > (1 + _ALIKE) * first.saved_bytes
    return f" with {_saved(first, other)}" if more else " and saves no memory for backward"


def _remarks(other: Summary) -> Iterator[str]:
    if other.skipped > _MANY_SKIPS * other.optimizer_steps:
        yield f"{other.skipped} of {other.optimizer_steps} steps skipped ({other.skip_reason})"
    if any(run.unscaled for run in other.trained):
        yield UNSCALED
    if other.failed:
        yield f"{len(other.failed)} of {len(other.runs)} runs failed"
    yield from _broken_losses(other)


def _broken_losses(each: Summary) -> Iterator[str]:
    """Yields that losses on the way were not finite, where the final ones do not tell."""
    broken = sum(_count_nonfinite(run.losses) for run in each.trained)
    if broken and not _count_nonfinite(each.last_losses):
        total = sum(len(run.losses) for run in each.trained)
        yield f"{broken} of {total} losses of {each.policy} not finite"


def _count_nonfinite(values: Sequence[float]) -> int:
    return sum(not math.isfinite(value) for value in values)


def _ratio(value: float | None, reference: float | None) -> float | None:
    return None if value is None or not reference else value / reference


def _mean(values: Sequence[float]) -> float:
    return mean(values) or 0.0
