"""What one run of a script under one policy gave, and its JSON form."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from signal import Signals
from statistics import median
from typing import Any, NamedTuple, Self

from halfstep.core import Policy, is_auto

_WARM_UP_STEPS = 10
_LAST_FRACTION = 10
_SIGNALS = {each.value: each.name for each in Signals}


class Skip(NamedTuple):
    """A step whose update was not applied, counted from 1."""

    step: int
    reason: str


class MetricValue(NamedTuple):
    """A number that the script reported, and the number of steps that were done by then."""

    name: str
    value: float
    step: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What one process, one policy and one seed gave.

    Args:
        policy: The policy's text, as the user wrote it.
        seed: What the random generators were seeded with, None where they were left alone.
        exit_code: What the process returned; negative is the signal that ended it.
        error: Why the run failed, "" where it did not.
        steps: How often the optimizer stepped, or `scaler.update()` of halfstep was called; the
            first one's where there are several. Without any, how often backward ran.
        optimizer_steps: How often any optimizer was to step, skipped steps too.
        scalers: How many optimizers, or GradScalers of halfstep, took steps.
        backwards: How many backward passes were seen; none of scripts that only tell of losses.
        losses: Each loss that was scaled, or else that backward started from, in order.
        step_seconds: The time from each step to the next one.
        measured_step: The index in `step_seconds` of the step in which the bytes saved for
            backward were counted, which is slower for it; -1 where none was.
        skipped: The optimizer steps that were not applied.
        scale: The last scale of the first scaler; None where there was no step.
        regions: How many models became regions, by whoever's policy.
        region_policies: The policies of those regions.
        auto: The texts of the policies that `auto` stood for, if that is the policy.
        why: Why, in a line for each.
        lowered: Whether anything was to compute in low precision by halfstep, None if unknown.
        torch_amp: Whether the script scaled its losses with PyTorch's own GradScaler.
        metrics: Every value that was given to `halfstep.metric`.
        saved_bytes: Bytes kept for backward in one step, None where they were not counted.
        peak_memory: The most bytes in use, None where this system does not tell.
        peak_memory_kind: What `peak_memory` counts.
        seconds: How long the process took, its start included.
        device: What the run computed on.
        date: When it started, ISO 8601, UTC.
        versions: (name, version) of Python and the libraries.
    """

    policy: str
    seed: int | None = None
    exit_code: int = 0
    error: str = ""
    steps: int = 0
    optimizer_steps: int = 0
    scalers: int = 0
    backwards: int = 0
    losses: tuple[float, ...] = ()
    step_seconds: tuple[float, ...] = ()
    measured_step: int = -1
    skipped: tuple[Skip, ...] = ()
    scale: float | None = None
    regions: int = 0
    region_policies: tuple[str, ...] = ()
    auto: tuple[str, ...] = ()
    why: tuple[str, ...] = ()
    lowered: bool | None = None
    torch_amp: bool = False
    metrics: tuple[MetricValue, ...] = ()
    saved_bytes: int | None = None
    peak_memory: int | None = None
    peak_memory_kind: str = ""
    seconds: float = 0.0
    device: str = ""
    date: str = ""
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the script ended with an error."""
        return self.exit_code != 0 or bool(self.error)

    @property
    def asked(self) -> tuple[Policy, ...]:
        """The policies that the run was to train under: of `auto`, those that it stood for.

        Example:
            >>> [str(each) for each in RunResult(policy="auto", auto=("mixed_bfloat16",)).asked]
            ['mixed_bfloat16']
        """
        texts = self.auto if is_auto(self.policy) else filter(None, (self.policy,))
        return tuple(map(Policy.parse, texts))

    @property
    def ineffective(self) -> bool:
        """Whether nothing ran under the policy, although it is another one than float32.

        Example:
            >>> RunResult(policy="mixed_float16", lowered=False).ineffective
            True
        """
        if self.lowered is not False or any(map(_is_low, self.region_policies)):
            return False
        unknown = is_auto(self.policy) and not self.auto
        return unknown or any(each.compute_dtype != "float32" for each in self.asked)

    @property
    def unscaled(self) -> bool:
        """Whether a loop of Keras trained in float16 without the loss scale that it needs.

        Example:
            >>> seen = {"steps": 9, "scale": 1.0, "versions": (("keras", "3.15.1"),)}
            >>> RunResult(policy="mixed_float16", **seen).unscaled
            True
        """
        if self.scale != 1.0 or self.skipped or "keras" not in dict(self.versions):
            return False
        scaled = any(
            each.compute_dtype == "float16" and each.scale.init_scale > 1.0 for each in self.asked
        )
        return scaled and not self.ineffective

    @property
    def name(self) -> str:
        """The policy and the seed, for a person."""
        return f"{self.policy} seed {self.seed}"

    @property
    def ending(self) -> str:
        """How the process ended, for a person."""
        return ending_text(self.exit_code)

    @property
    def first_loss(self) -> float | None:
        """The loss of the first step."""
        return self.losses[0] if self.losses else None

    @property
    def last_loss(self) -> float | None:
        """The mean of the last tenth of the losses: one batch's loss says little.

        Example:
            >>> RunResult(policy="float32", seed=0, losses=(9.0,) * 18 + (2.0, 1.0)).last_loss
            1.5
        """
        if not self.losses:
            return None
        tail = self.losses[-max(1, len(self.losses) // _LAST_FRACTION) :]
        return sum(tail) / len(tail)

    @property
    def steps_per_second(self) -> float | None:
        """One over the median step time, warm-up and the measured step left out.

        Example:
            >>> times = (9.0, 9.0, 1.0, 1.0, 1.0)
            >>> RunResult(policy="float32", seed=0, step_seconds=times).steps_per_second
            1.0
        """
        times = [seconds for i, seconds in enumerate(self.step_seconds) if i != self.measured_step]
        steady = times[min(_WARM_UP_STEPS, len(times) // 2) :]
        middle = median(steady) if steady else 0.0
        return 1 / middle if middle > 0 else None

    @property
    def last_metrics(self) -> dict[str, float]:
        """The last value of each metric, in the order in which they were first reported."""
        return {metric.name: metric.value for metric in self.metrics}

    def to_dict(self) -> dict[str, Any]:
        """Returns the run as JSON types; Inf and NaN, which JSON lacks, as text."""
        values = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        return values | {"versions": dict(self.versions)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Returns the run that `to_dict` wrote.

        Example:
            >>> run = RunResult(policy="float32", seed=0, losses=(1.0, float("inf")))
            >>> RunResult.from_dict(run.to_dict()) == run
            True
        """
        readers = {name: _READERS[name] for name in _READERS.keys() & data.keys()}
        return cls(**data | {name: read(data[name]) for name, read in readers.items()})


def _is_low(policy: str) -> bool:
    return Policy.parse(policy).compute_dtype != "float32"


def ending_text(exit_code: int) -> str:
    """Returns how a process ended, for a person.

    Example:
        >>> ending_text(1), ending_text(-9)
        ('exit code 1', 'killed by SIGKILL')
    """
    if exit_code < 0:
        return f"killed by {_SIGNALS.get(-exit_code, f'signal {-exit_code}')}"
    return f"exit code {exit_code}"


def _floats(values: list[float | str]) -> tuple[float, ...]:
    return tuple(map(float, values))


_READERS: dict[str, Callable[[Any], Any]] = {
    "losses": _floats,
    "step_seconds": _floats,
    "skipped": lambda rows: tuple(Skip(**row) for row in rows),
    "metrics": lambda rows: tuple(
        MetricValue(row["name"], float(row["value"]), row["step"]) for row in rows
    ),
    "scale": lambda value: None if value is None else float(value),
    "region_policies": tuple,
    "auto": tuple,
    "why": tuple,
    "versions": lambda names: tuple(names.items()),
}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Skip | MetricValue):
        return {name: _plain(item) for name, item in value._asdict().items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
