"""Collects the messages of one run into its result."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.launch._runs import MetricValue, RunResult, Skip


class RunLog:
    """What a run has told so far.

    Args:
        policy: The policy's text.
        seed: The run's seed, if it has one.

    Example:
        >>> log = RunLog("float32", 0)
        >>> log.add({"kind": "metric", "name": "accuracy", "value": 0.5, "step": 3})
        >>> log.result(exit_code=0, error="", seconds=1.0).last_metrics
        {'accuracy': 0.5}
    """

    def __init__(self, policy: str, seed: int | None = None) -> None:
        self._values: dict[str, Any] = {"policy": policy, "seed": seed}
        self._losses = array("d")
        self._step_seconds = array("d")
        self._skipped: list[Skip] = []
        self._metrics: list[MetricValue] = []
        self._readers: dict[str, Callable[..., None]] = {
            "batch": self._add_batch,
            "metric": self._add_metric,
            "auto": self._add_auto,
        }

    def add(self, message: dict[str, Any]) -> None:
        """Takes one message."""
        values = dict(message)
        read: Callable[..., None] = self._readers.get(values.pop("kind"), self._add_values)
        read(**values)

    @property
    def text(self) -> str:
        """How far the run is, for a progress line."""
        loss = f", loss {self._losses[-1]:.4g}" if self._losses else ""
        return f"{self._values.get('steps', 0)} steps{loss}"

    @property
    def error(self) -> str:
        """The traceback that the run sent, "" where there was none."""
        return str(self._values.get("error", ""))

    def result(self, *, exit_code: int, error: str, seconds: float) -> RunResult:
        """Returns the run once its process has ended."""
        values = self._values | {"exit_code": exit_code, "error": error, "seconds": seconds}
        return RunResult(
            **values,
            losses=tuple(self._losses),
            step_seconds=tuple(self._step_seconds),
            skipped=tuple(self._skipped),
            metrics=tuple(self._metrics),
        )

    def _add_batch(
        self,
        losses: list[float],
        step_seconds: list[float],
        skipped: list[tuple[int, str]],
        region_policies: Sequence[str] = (),
        **values: Any,
    ) -> None:
        self._losses.extend(losses)
        self._step_seconds.extend(step_seconds)
        self._skipped += [Skip(*each) for each in skipped]
        self._values |= values | {"region_policies": tuple(region_policies)}

    def _add_metric(self, name: str, value: float, step: int) -> None:
        self._metrics.append(MetricValue(name, value, step))

    def _add_auto(self, auto: list[str], why: list[str]) -> None:
        self._values |= {"auto": tuple(auto), "why": tuple(why)}

    def _add_values(self, versions: dict[str, str] | None = None, **values: Any) -> None:
        self._values |= values
        if versions is not None:
            self._values["versions"] = tuple(versions.items())
