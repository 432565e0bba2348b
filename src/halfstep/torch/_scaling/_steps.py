"""What the steps of a scaler did: one record per step, and a bounded history."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch.optim import Optimizer

from halfstep.core import Culprits, culprits_text, tell_skips, where_from
from halfstep.torch._scaling._optimizers import PerOptimizer, reference

Value = TypeVar("Value")
Lazy: TypeAlias = Value | Callable[[], Value]

LOSS = "the loss was not finite"
LATE = "a gradient became non-finite after unscale_()"
EMPTY = "no gradients"
NOT_YET = "step() was not called yet"
_FIELDS = ("skipped", "reason", "scale", "nonfinite", "loss_nonfinite", "grad_norm")


class StepRecord:
    """What one call of `GradScaler.step`, or of an optimizer of a region, did.

    Every value may be given as a function without arguments; it is asked once, when somebody
    reads the value, so that a step on an accelerator does not wait for the device.

    Args:
        skipped: Whether the optimizer left the parameters alone.
        reason: Why it did, in words; empty if it did not.
        scale: The loss scale during the step.
        nonfinite: Name and kind, "inf", "nan" or "inf and nan", of each non-finite gradient.
        loss_nonfinite: Whether what was passed to `scale` was already not finite.
        grad_norm: The norm that clipping found before the step, None if there was none.

    Example:
        >>> record = StepRecord(skipped=lambda: False, scale=8.0)
        >>> record.skipped
        False
        >>> record
        StepRecord(skipped=False, reason='', scale=8.0, nonfinite=(), loss_nonfinite=False, \
grad_norm=None)
    """

    __slots__ = ("__weakref__", *(f"_{name}" for name in _FIELDS))

    def __init__(
        self,
        *,
        skipped: Lazy[bool] = False,
        reason: Lazy[str] = "",
        scale: Lazy[float] = 1.0,
        nonfinite: Lazy[Culprits] = (),
        loss_nonfinite: Lazy[bool] = False,
        grad_norm: Lazy[float | None] = None,
    ) -> None:
        self._skipped = skipped
        self._reason = reason
        self._scale = scale
        self._nonfinite = nonfinite
        self._loss_nonfinite = loss_nonfinite
        self._grad_norm = grad_norm

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left the parameters alone."""
        return self._read("_skipped")

    @property
    def reason(self) -> str:
        """Why the step was skipped; empty if it was not."""
        return self._read("_reason")

    @property
    def scale(self) -> float:
        """The loss scale during the step."""
        return self._read("_scale")

    @property
    def nonfinite(self) -> Culprits:
        """Name and kind of each gradient that was not finite."""
        return self._read("_nonfinite")

    @property
    def loss_nonfinite(self) -> bool:
        """Whether what was passed to `scale` was already not finite."""
        return self._read("_loss_nonfinite")

    @property
    def grad_norm(self) -> float | None:
        """The norm of the true-valued gradients before clipping, None if nobody measured it."""
        return self._read("_grad_norm")

    @property
    def known(self) -> bool:
        """Whether the host knows the outcome without waiting for a device."""
        return not callable(self._skipped)

    def _read(self, field: str) -> Any:
        value = getattr(self, field)
        if callable(value):
            value = value()
            setattr(self, field, value)
        return value

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIELDS}

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._values(),)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._values().items())
        return f"StepRecord({shown})"


def _restored(values: dict[str, Any]) -> StepRecord:
    return StepRecord(**values)


def advice(record: StepRecord) -> str:
    """Returns which parameters were affected and what to do about it."""
    text = f"Parameters with non-finite gradients: {culprits_text(record.nonfinite)}."
    if record.loss_nonfinite:
        return (
            f"The loss itself was not finite, so no loss scale helps. {text} Look for the cause in "
            "the forward pass: the inputs, the learning rate, or an operation that overflows in "
            f"float16 and needs a rule that computes it in float32. {where_from('torch')}"
        )
    return (
        f"The loss was finite. {text} Compute the operations behind them in float32, use bfloat16, "
        f"or lower the learning rate. {where_from('torch')}"
    )


def _because(record: StepRecord) -> str:
    why = f"the latest because {record.reason} at loss scale {record.scale:g}"
    return f"{why}. {advice(record)}"


@dataclass(frozen=True)
class ScaleChange:
    """One change of the loss scale: after how many steps, from what to what, and why."""

    steps: int
    before: float
    after: float
    reason: str

    def __str__(self) -> str:
        return f"after step {self.steps}: {self.before:g} -> {self.after:g}, {self.reason}"


class History:
    """Counts steps and keeps the latest changes of the scale, with their reasons.

    Reading a count waits for the device if the outcome of a step is known only there.

    Example:
        >>> history = History()
        >>> history.changed(65536.0, 32768.0, "gradients held inf")
        >>> print(history)
        0 steps, 0 skipped, 0 of them in a row up to now
        after step 0: 65536 -> 32768, gradients held inf
    """

    def __init__(self, max_consecutive_skips: int | None = None, kept: int = 1000) -> None:
        self._max_consecutive_skips = max_consecutive_skips
        self._steps = self._skipped = 0
        self._changes: deque[ScaleChange] = deque(maxlen=kept)
        self._forget_optimizers()

    def _forget_optimizers(self) -> None:
        self._rows: PerOptimizer[int] = PerOptimizer()
        self._waiting: list[tuple[Callable[[], Any], StepRecord]] = []

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return {**self.__dict__, "_rows": None, "_waiting": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_optimizers()

    @property
    def steps(self) -> int:
        """How many steps were asked for."""
        return self._steps

    @property
    def skipped(self) -> int:
        """How many of them were skipped."""
        self.settle()
        return self._skipped

    @property
    def consecutive_skips(self) -> int:
        """How many of the latest steps were skipped in a row, for the optimizer with the most."""
        self.settle()
        return max(self._rows.values(), default=0)

    @property
    def scale_changes(self) -> list[ScaleChange]:
        """The latest changes of the scale, oldest first."""
        return list(self._changes)

    def changed(self, before: float, after: float, reason: str) -> None:
        """Notes a change of the scale, if it is one."""
        if before != after:
            self._changes.append(ScaleChange(self._steps, before, after, reason))

    def add(self, optimizer: Optimizer, record: StepRecord) -> None:
        """Counts a step; one whose outcome is still on the device is counted when it is known."""
        self._steps += 1
        if record._skipped is False and not self._rows:
            return
        if record.known:
            self._count(optimizer, record)
        else:
            self._waiting.append((reference(optimizer), record))

    def settle(self) -> None:
        """Counts the steps whose outcome was still on a device, and waits for it."""
        while self._waiting:
            alive, record = self._waiting.pop(0)
            optimizer = alive()
            if optimizer is not None:
                self._count(optimizer, record)

    def _count(self, optimizer: Optimizer, record: StepRecord) -> None:
        if not record.skipped:
            self._rows.pop(optimizer)
            return
        self._skipped += 1
        # Not `reason`, which would be read, and kept, before the iteration is over.
        if record._reason != EMPTY:
            self._rows[optimizer] = row = (self._rows.get(optimizer) or 0) + 1
            self._speak(row, record)

    def _speak(self, row: int, record: StepRecord) -> None:
        """Stays quiet at first, then warns ever more rarely, or raises an error if asked to."""
        tell_skips(
            "GradScaler", self._max_consecutive_skips, row - 1, row, lambda: _because(record)
        )

    def __str__(self) -> str:
        head = f"{self.steps} steps, {self.skipped} skipped, "
        lines = [f"{head}{self.consecutive_skips} of them in a row up to now"]
        return "\n".join([*lines, *map(str, self._changes)])

    __repr__ = __str__
