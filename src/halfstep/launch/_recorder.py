"""Turns the events of a training script into the messages that the parent reads."""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from halfstep.launch._probe import Probe, SavedBytes

_PERIOD_SECONDS = 0.25

Send = Callable[[dict[str, Any]], None]


class Recorder:
    """Listens to the events of this process and sends them on in batches.

    Losses and step records are kept as they come and read a few times a second, so that an
    accelerator is not waited for at each step.

    Args:
        probe: What measures.
        send: Receives one message at a time, JSON types only.
        clock: What the time is, in seconds.
    """

    def __init__(
        self, probe: Probe, send: Send, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._probe, self._send, self._clock = probe, send, clock
        self._handlers: dict[str, Callable[..., None]] = {
            "backward": self._on_backward,
            "loss": self._on_loss,
            "step": self._on_step,
            "update": self._on_update,
            "scale": self._on_scale,
            "region": self._on_region,
            "auto": self._on_auto,
            "metric": self._on_metric,
        }
        self._losses: list[Any] = []
        self._records: list[tuple[int, Any]] = []
        self._marks: list[tuple[Any, int]] = []  # with how many steps ended there
        self._scale: Any = None
        self._updates = self._attempts = self._backwards = 0
        self._from_scaler = self._scaled = self._torch_amp = False
        self._regions: Counter[str] = Counter()
        self._chosen: dict[str, str] = {}  # what `auto` is, and why
        self._scalers: list[int | None] = []
        self._counting = contextlib.ExitStack()
        self._counted: SavedBytes | None = None
        self._counting_thread = 0
        self._flushed = clock()
        self._lock = threading.RLock()  # a script may train in several threads

    def use(self, probe: Probe) -> None:
        """Lets another probe measure from now on: a framework was imported."""
        with self._lock:
            self.flush()
            self._probe, self._marks = probe, []

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """Takes one event."""
        with self._lock:
            if event in self._handlers:
                self._handlers[event](**values)
            if self._clock() - self._flushed >= _PERIOD_SECONDS:
                self.flush()

    def flush(self) -> None:
        """Sends what came since the last time."""
        with self._lock:
            self._flush()

    def _flush(self) -> None:
        self._send(
            {
                "kind": "batch",
                "losses": self._probe.floats(self._losses),
                "step_seconds": self._step_seconds(),
                "skipped": [[step, each.reason] for step, each in self._records if each.skipped],
                # A script that changes its parameters by hand does so after each backward pass.
                "steps": self._updates or self._backwards,
                "optimizer_steps": self._attempts,
                "backwards": self._backwards,
                "scalers": len(self._scalers),
                "scale": None if self._scale is None else self._probe.floats([self._scale])[0],
                "regions": self._regions.total(),
                "region_policies": list(self._regions),
                "lowered": self._scaled or self._probe.has_lowered(),
                "torch_amp": self._torch_amp,
            }
        )
        self._losses, self._records, self._marks = [], [], self._marks[-1:]
        self._flushed = self._clock()

    def _step_seconds(self) -> list[float]:
        """Returns how long each step took; those that ended together took the same time."""
        times = self._probe.seconds([mark for mark, _ in self._marks])
        # There is no time between two clocks, of which the later one is the device's.
        counts = [count for _, count in self._marks[len(self._marks) - len(times) :]]
        pairs = zip(times, counts, strict=True)
        return [time / count for time, count in pairs for _ in range(count)]

    def _on_backward(self) -> None:
        self._backwards += 1
        if not self._updates:
            self._marks.append((self._probe.tick(), 1))

    def _on_loss(self, value: Any, source: str = "") -> None:
        """Keeps a loss; once a scaler tells of losses, backward starts from scaled ones."""
        self._scaled |= source == ""
        self._torch_amp |= source == "scale"
        if source == "backward" and self._from_scaler:
            return
        self._from_scaler = source != "backward"
        self._losses.append(self._probe.snapshot(value))

    def _on_step(self, record: Any) -> None:
        self._attempts += 1
        self._records.append((self._updates + 1, record))

    def _on_update(self, scale: Any, scaler: int | None = None, steps: int = 1) -> None:
        """Counts the steps at each update of the first scaler, however many scalers there are.

        From one of its updates to the next is one round of the script's loop.
        """
        if scaler not in self._scalers:
            self._scalers.append(scaler)
        if scaler != self._scalers[0]:
            return
        self._marks = [*(self._marks if self._updates else ()), (self._probe.tick(), steps)]
        self._scale = self._probe.snapshot(scale)
        self._updates += steps
        self._count_saved_bytes()

    def _on_scale(self, scale: Any, scalers: Sequence[int]) -> None:
        """Learns what became of the scale after the step."""
        if self._scalers and self._scalers[0] in scalers:
            self._scale = self._probe.snapshot(scale)

    def _on_region(self, policy: str) -> None:
        self._regions[policy] += 1

    def _on_auto(self, policy: str, why: str) -> None:
        if self._chosen.get(policy) != why:
            self._chosen[policy] = why
            self._send(
                {"kind": "auto", "auto": list(self._chosen), "why": list(self._chosen.values())}
            )

    def _on_metric(self, name: str, value: float) -> None:
        self._send({"kind": "metric", "name": name, "value": float(value), "step": self._updates})

    def _count_saved_bytes(self) -> None:
        """Counts during the second step: the first one also makes what all later steps share."""
        if self._updates == 1 and self._probe.may_count():
            self._counting_thread = threading.get_ident()
            self._counted = self._counting.enter_context(self._probe.saved_bytes())
        elif self._counted is not None and self._may_end(self._counted):
            self._counting.close()
            # It may not have been allowed to end with the step, and then is not the step's.
            if self._updates == 2 and self._counted.bytes is not None:
                self._send(
                    {"kind": "saved", "saved_bytes": self._counted.bytes, "measured_step": 0}
                )
            self._counted = None

    def _may_end(self, counted: SavedBytes) -> bool:
        # Another thread could not end it: what is saved is counted for one thread.
        return self._counting_thread == threading.get_ident() and counted.may_end()
