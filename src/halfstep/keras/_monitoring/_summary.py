"""What a monitored training did: its counts, and which steps were skipped why."""

from dataclasses import dataclass

from halfstep.core import Culprits, culprits_text, overflow_reason

_SHOWN = 10


@dataclass(frozen=True)
class SkippedSteps:
    """Steps that were skipped between two looks of a `Monitor` at the optimizer.

    Args:
        epoch: In which epoch, from 0 as in Keras' callbacks.
        batch: After which of its batches the monitor looked, from 0.
        skipped: How many steps were skipped since the look before.
        scale: The loss scale after them.
        nonfinite: Path and kind, "inf", "nan" or "inf and nan", of each variable whose gradient
            was not finite in one of them; empty where the optimizer does not know.
        first_batch: The first batch since the look before, None if that is `batch`.

    Example:
        >>> print(SkippedSteps(0, 9, 1, 16384.0, (("model/dense/kernel", "inf"),)))
        epoch 1, batch 10: 1 skipped, gradients held inf: model/dense/kernel (inf); scale 16384
        >>> print(SkippedSteps(0, 9, 1, 16384.0, first_batch=0))
        epoch 1, batches 1 to 10: 1 skipped, gradients were not finite; scale 16384
    """

    epoch: int
    batch: int
    skipped: int
    scale: float
    nonfinite: Culprits = ()
    first_batch: int | None = None

    @property
    def reason(self) -> str:
        """Why they were skipped, in words."""
        return overflow_reason(self.nonfinite)

    def __str__(self) -> str:
        names = f": {culprits_text(self.nonfinite)}" if self.nonfinite else ""
        where = f"epoch {self.epoch + 1}, {self._batches()}"
        return f"{where}: {self.skipped} skipped, {self.reason}{names}; scale {self.scale:g}"

    def _batches(self) -> str:
        first = self.batch if self.first_batch is None else self.first_batch
        last = f"batch {self.batch + 1}"
        return last if first == self.batch else f"batches {first + 1} to {self.batch + 1}"


@dataclass(frozen=True)
class TrainingSummary:
    """What the steps of a training did, as text with `str`.

    Args:
        steps: How many steps were asked for in this training.
        skipped: How many of them were skipped.
        scale: The loss scale now.
        skips: The latest skipped steps, oldest first.

    Example:
        >>> print(TrainingSummary(24, 1, 16384.0, (SkippedSteps(0, 9, 1, 16384.0),)))
        24 steps, 1 skipped, loss scale now 16384
        epoch 1, batch 10: 1 skipped, gradients were not finite; scale 16384
    """

    steps: int
    skipped: int
    scale: float
    skips: tuple[SkippedSteps, ...] = ()

    def __str__(self) -> str:
        head = f"{self.steps} steps, {self.skipped} skipped, loss scale now {self.scale:g}"
        hidden = len(self.skips) - _SHOWN
        more = [f"{hidden} earlier ones in Monitor.summary.skips"] if hidden > 0 else []
        return "\n".join([head, *more, *map(str, self.skips[-_SHOWN:])])
