"""Waits for a step of a script, and lets the framework measure it."""

from collections.abc import Callable
from typing import Any

from halfstep.core import Plan
from halfstep.errors import HalfstepError, UsageError
from halfstep.launch import Probe, Send

ONLY_PYTORCH = "plan knows training scripts of PyTorch; those of Keras and JAX it does not know yet"


class Planner:
    """Counts steps, and has one of them measured.

    Args:
        send: Receives one message at a time, JSON types only.
        step: The step.
        seconds: About how long to measure.
        budget: How far an operation may be from float32.
    """

    def __init__(self, send: Send, *, step: int, seconds: float, budget: float) -> None:
        self._send, self._step = send, step
        self._settings = {"seconds": seconds, "budget": budget}
        self._looking: Any = None
        self._end_looking: Callable[[], None] = lambda: None
        self._first: int | None = None
        self.steps = 0

    def meet(self, probe: Probe) -> None:
        """Looks at what a framework runs from now on: it was imported."""
        self._end_looking()
        self._looking = probe.look_closely()
        if self._looking is not None:
            self._end_looking = self._looking.start()

    def __call__(self, event: str, values: dict[str, Any]) -> None:
        """Takes one event."""
        if event == "update":
            self._on_update(**values)

    def _on_update(self, scale: Any, scaler: int | None = None, steps: int = 1) -> None:
        """Counts the steps of the first optimizer, however many there are."""
        self._first = scaler if self._first is None else self._first
        if scaler != self._first:
            return
        self.steps += steps
        if self.steps >= self._step:
            self._measure()
        elif self._looking is not None:
            self._looking.forget()

    def _measure(self) -> None:
        try:
            found = self._found()
        except HalfstepError as error:
            self._send({"kind": "refused", "why": str(error)})
        else:
            self._send({"kind": "plan", "plan": found.to_toml()})

    def _found(self) -> Plan:
        if not hasattr(self._looking, "plan"):
            raise UsageError(ONLY_PYTORCH)
        found: Plan | None = self._looking.plan(tell=self._tell, **self._settings)
        if found is None:
            raise UsageError(
                "No model was called in the step. plan measures calls of a torch.nn.Module that "
                "trains: call the model itself, not a method of it"
            )
        return found

    def _tell(self, text: str) -> None:
        self._send({"kind": "telling", "text": text})
