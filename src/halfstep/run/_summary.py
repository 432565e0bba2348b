"""The runs of one policy, taken together."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from halfstep.launch import RunResult


@dataclass(frozen=True)
class Summary:
    """What one policy gave over all seeds; only runs that trained to the end count.

    Args:
        policy: The policy's text.
        runs: Every run under it, failed ones too.

    Example:
        >>> runs = [RunResult(policy="float32", seed=i, steps=9, losses=(1.0 + i,)) for i in (0, 1)]
        >>> Summary("float32", tuple(runs)).last_losses
        (1.0, 2.0)
    """

    policy: str
    runs: tuple[RunResult, ...]

    @property
    def trained(self) -> tuple[RunResult, ...]:
        """The runs that ended well and made at least one step."""
        return tuple(run for run in self.runs if not run.failed and run.steps)

    @property
    def failed(self) -> tuple[RunResult, ...]:
        """The runs that ended with an error."""
        return tuple(run for run in self.runs if run.failed)

    @property
    def ineffective(self) -> bool:
        """Whether nothing ran under the policy in any run."""
        return bool(self.trained) and all(run.ineffective for run in self.trained)

    @property
    def first_losses(self) -> tuple[float, ...]:
        """The first loss of each run."""
        return self.each(lambda run: run.first_loss)

    @property
    def last_losses(self) -> tuple[float, ...]:
        """The last loss of each run, averaged over its last tenth."""
        return self.each(lambda run: run.last_loss)

    @property
    def steps_per_second(self) -> float | None:
        """The mean speed."""
        return mean(self.each(lambda run: run.steps_per_second))

    @property
    def saved_bytes(self) -> float | None:
        """The mean of the bytes saved for backward in one step."""
        return mean(self.each(lambda run: run.saved_bytes))

    @property
    def peak_memory(self) -> float | None:
        """The mean of the peaks."""
        return mean(self.each(lambda run: run.peak_memory))

    @property
    def steps(self) -> int:
        """The steps of all runs together."""
        return sum(run.steps for run in self.trained)

    @property
    def optimizer_steps(self) -> int:
        """The optimizer steps of all runs together, skipped ones too."""
        return sum(run.optimizer_steps for run in self.trained)

    @property
    def scalers(self) -> int:
        """The most scalers that a run used."""
        return max((run.scalers for run in self.trained), default=0)

    @property
    def skipped(self) -> int:
        """The skipped optimizer steps of all runs together."""
        return sum(len(run.skipped) for run in self.trained)

    @property
    def skip_reason(self) -> str:
        """The most frequent reason for a skipped step, "" where none was skipped."""
        reasons = Counter(skip.reason for run in self.trained for skip in run.skipped)
        return next((reason for reason, _ in reasons.most_common(1)), "")

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics, in the order in which they were first reported."""
        return tuple(dict.fromkeys(name for run in self.trained for name in run.last_metrics))

    def metric(self, name: str) -> tuple[float, ...]:
        """Returns the last value of a metric in each run that reported it."""
        return self.each(lambda run: run.last_metrics.get(name))

    def each(self, get: Callable[[RunResult], float | None]) -> tuple[float, ...]:
        """Returns a value of each run that trained, the unknown ones left out."""
        return tuple(value for value in map(get, self.trained) if value is not None)


def summarise(runs: Sequence[RunResult]) -> tuple[Summary, ...]:
    """Returns one summary per policy, in the order of their first runs."""
    policies = dict.fromkeys(run.policy for run in runs)
    return tuple(
        Summary(policy, tuple(run for run in runs if run.policy == policy)) for policy in policies
    )


def mean(values: Sequence[float]) -> float | None:
    """Returns the mean, None of nothing.

    Example:
        >>> mean([1.0, 2.0]), mean([])
        (1.5, None)
    """
    return sum(values) / len(values) if values else None


def spread(values: Sequence[float]) -> float:
    """Returns the largest difference between two of the values.

    Example:
        >>> spread([1.0, 3.0, 2.0])
        2.0
    """
    return max(values) - min(values) if values else 0.0
