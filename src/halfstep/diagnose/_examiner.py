"""Listens to a script step by step, and looks closely at some steps and at those that fail."""

import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.core import Diagnosis, Report, Step
from halfstep.launch import NoProbe, Probe, Send

_PERIOD_SECONDS = 0.25
# Besides each so-and-so-manieth: the values that a training starts from, and what follows.
_EARLY = (1, 10)
_MOST_FAULTS = 8


class Examiner:
    """Tells of each step, of the ranges in some, and of what broke those that were skipped.

    Args:
        send: Receives one message at a time, JSON types only.
        every: At each how many steps to look closely.
        steps: After how many to stop, 0 for not at all.
        clock: What the time is, in seconds.
    """

    def __init__(
        self, send: Send, *, every: int, steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._send, self._every, self._steps, self._clock = send, every, steps, clock
        self._probe: Probe = NoProbe()
        self._looking: Any = None
        self._end_looking: Callable[[], None] = lambda: None
        self.stop: Callable[[], None] = lambda: None
        self._handlers: dict[str, Callable[..., None]] = {
            "loss": self._on_loss,
            "nonfinite": self._on_nonfinite,
            "precision": self._on_precision,
            "step": self._on_step,
            "update": self._on_update,
        }
        self._losses: list[Any] = []
        self._records: list[Any] = []
        self._asked: list[dict[str, str]] = []
        self._pending: list[Step] = []
        self._first: int | None = None
        self._number = self._faults = 0
        self._from_scaler = self._looked = self._has_ranges = self._has_taken = False
        self._scale = 1.0
        self._flushed = clock()
        self._lock = threading.RLock()

    def meet(self, probe: Probe) -> None:
        """Measures with a probe from now on: a framework was imported."""
        self._probe = probe
        self._end_looking()
        self._looking = probe.look_closely()
        if self._looking is not None:
            self._end_looking = self._looking.start()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """Takes one event."""
        if event in self._handlers:
            with self._lock:
                self._handlers[event](**values)

    def finish(self) -> None:
        """Sends what is left, when the script has ended or is to end."""
        with self._lock:
            if not self._number:
                # A script that changes its parameters by hand does so after each loss.
                self._pending = [Step(place, loss) for place, loss in enumerate(self._losses, 1)]
            self._flush()
            self._send({"kind": "frameworks", "frameworks": _frameworks()})
            for text in self._looking.notes if self._looking else ():
                self._send({"kind": "note", "text": text})
        self.stop()

    def _on_loss(self, value: Any, source: str = "") -> None:
        """Keeps a loss; once a scaler tells of losses, backward starts from scaled ones."""
        if source == "backward" and self._from_scaler:
            return
        self._from_scaler = source != "backward"
        (loss,) = self._probe.floats([self._probe.snapshot(value)])
        self._losses.append(loss)
        if not math.isfinite(loss):
            self._look_for_faults(self._number + 1, line=_line_of_script())

    def _on_nonfinite(self) -> None:
        """Learns that the step has made something that is not finite, whatever its loss is."""
        self._look_for_faults(self._number + 1)

    def _on_precision(self, **asked: str) -> None:
        """Tells once of each precision that the script asks for itself."""
        if asked not in self._asked:
            self._asked.append(asked)
            self._send({"kind": "precision", "step": self._number, **asked})

    def _on_step(self, record: Any) -> None:
        self._records.append(record)

    def _on_update(self, scale: Any, scaler: int | None = None, steps: int = 1) -> None:
        """Ends a step at each update of the first scaler, however many scalers there are."""
        self._first = scaler if self._first is None else self._first
        if scaler != self._first:
            return
        (found,) = self._probe.floats([self._probe.snapshot(scale)])
        for made in self._made(found, steps):
            self._pending.append(made)
            self._look(made)
        self._number += steps
        self._losses, self._records, self._looked = [], [], False
        if self._looking is not None:
            self._looking.forget()
            self._looking.expect(sampled=self._is_sampled(self._number + 1))
        self._end_step()

    def _made(self, scale: float, steps: int) -> Sequence[Step]:
        """Returns what became of the steps that ended: one, or several that a loop does at once."""
        records = self._records[:steps] if steps > 1 else [_joint(self._records)]
        losses = self._losses if steps > 1 else [_mean(self._losses)]
        return [
            _step(self._number + 1 + index, _at(losses, index), scale, _at(records, index))
            for index in range(steps)
        ]

    def _look(self, step: Step) -> None:
        if not self._can_look:
            return
        self._scale = 1.0 if step.scale is None else step.scale
        if step.skipped:
            self._look_for_faults(step.number)
        # A step that was skipped says nothing of gradients, but more than nothing of the rest.
        if self._is_sampled(step.number) and not (step.skipped and self._has_ranges):
            self._has_taken = self._has_taken or not step.skipped
            self._attempt(step.number, self._look_at_ranges)

    def _is_sampled(self, number: int) -> bool:
        regular = number in (*_EARLY, self._steps) or number % self._every == 0
        # Others are compared with a step that was taken.
        return regular or not self._has_taken

    @property
    def _can_look(self) -> bool:
        return self._looking is not None and self._looking.has_calls

    def _look_at_ranges(self, number: int) -> None:
        seen = self._looking.ranges(self._scale)
        if seen is not None:
            self._has_ranges = True
            diagnosis = Diagnosis() if self._looked else self._looking.faults(self._scale)
            found = {"ranges": seen.ranges, "power": seen.power, "casts": seen.casts}
            self._tell(number, diagnosis=diagnosis, **found)

    def _look_for_faults(self, number: int, *, line: str = "") -> None:
        if self._looked or self._faults == _MOST_FAULTS or not self._can_look:
            return
        self._faults, self._looked = self._faults + 1, True

        def look(number: int) -> None:
            found: Diagnosis = self._looking.faults(self._scale)
            elsewhere = bool(line) and not self._looking.whole
            outside = not found and (elsewhere or self._looking.entered_broken)
            self._tell(number, failed=True, outside=outside, line=line, diagnosis=found)

        self._attempt(number, look)

    def _attempt(self, number: int, look: Callable[[int], None]) -> None:
        """Looks at a step, and tells why where it cannot be looked at; the script goes on."""
        try:
            look(number)
        except Exception as error:  # of a model that is anybody's
            first, _, _ = f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")
            self._send({"kind": "unseen", "step": number, "why": first})

    def _tell(
        self,
        number: int,
        *,
        failed: bool = False,
        outside: bool = False,
        line: str = "",
        **found: Any,
    ) -> None:
        report = Report(script="", policy="", sampled=(number,), **found)
        message = {"kind": "look", "failed": failed, "outside": outside, "line": line}
        for name in ("sizes", "only", "derived"):
            message[name] = getattr(self._looking, name)
        self._send({**message, "report": report.to_dict()})

    def _end_step(self) -> None:
        if 0 < self._steps <= self._number:  # a loop may do several at once
            self.finish()
            self._send({"kind": "enough"})
        elif self._clock() - self._flushed >= _PERIOD_SECONDS:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            report = Report(script="", policy="", steps=tuple(self._pending))
            self._send({"kind": "steps", "report": report.to_dict()})
        self._pending, self._flushed = [], self._clock()


def _line_of_script() -> str:
    """Returns the line of the script that runs, as "file:line", "" where it is not found."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "__main__":
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _frameworks() -> list[str]:
    return [name for name in ("torch", "keras", "jax") if name in sys.modules]


def _mean(losses: Sequence[float]) -> float | None:
    return sum(losses) / len(losses) if losses else None


def _at(values: Sequence[Any], index: int) -> Any:
    return values[index] if index < len(values) else None


def _joint(records: Sequence[Any]) -> Any:
    """Returns the record of the optimizer that skipped, or of the first, None without any."""
    skipped = [each for each in records if each.skipped]
    return (skipped or [*records, None])[0]


def _step(number: int, loss: float | None, scale: float, record: Any) -> Step:
    if record is None:
        return Step(number, loss, scale)
    own = float(getattr(record, "scale", 1.0))
    nonfinite = tuple(map(tuple, getattr(record, "nonfinite", ())))
    used = scale if own == 1.0 else own
    return Step(number, loss, used, bool(record.skipped), str(record.reason), nonfinite)
