"""Measures the memory of a target, each measurement in a process of its own."""

import json
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from halfstep.errors import UsageError
from halfstep.run._compare import DEFAULT_POLICIES, explain_exit
from halfstep.run._footprint import Activations, Findings, Footprint
from halfstep.run._layouts import LAYOUTS
from halfstep.run._log import RunLog
from halfstep.run._process import run_process
from halfstep.run._runs import RunResult
from halfstep.run._stdin import SharedInput
from halfstep.run._target import Target
from halfstep.run._untrained import why_untrained

_STEPS = 3
_KEPT_LINES = 20
# The policies of a script whose runs stand for a layout.
_SHOWN_BY = {"float32": "float32", "mixed_bfloat16": "cast masters"}
_ONLY_PREDICTED = "a script is run as it is, and would have to ask for this"
_NOT_COUNTED = "the script does something that keeps them from being counted"


class MemoryWatcher(Protocol):
    """Whoever shows how the measurements go."""

    def start(self, index: int) -> None:
        """Learns that a process begins."""

    def update(self, index: int, text: str) -> None:
        """Learns how far it is."""

    def finish(self, index: int, text: str, *, failed: bool) -> None:
        """Learns how it ended."""


def processes(target: Target) -> tuple[str, ...]:
    """Returns the names of the processes that measure a target."""
    return (target.name,) if target.builds else DEFAULT_POLICIES


def measure(target: Target, watcher: MemoryWatcher) -> Footprint:
    """Returns what training keeps in memory.

    Args:
        target: What to measure.
        watcher: Shows how it goes.
    """
    if target.builds:
        return _measure_model(target, watcher)
    return _measure_script(target, watcher)


class _Enough(Exception):
    """All is known: the script need not go on."""


class _Process:
    """One process, and what it tells.

    Args:
        job: What it does.
        readers: What takes which message; all others are those of any run.
    """

    def __init__(self, job: dict[str, Any], readers: dict[str, Callable[..., None]]) -> None:
        self._job, self._readers = {"seed": 0} | job, readers
        self._log, self._output = RunLog(job["policy"], 0), deque[str](maxlen=_KEPT_LINES)

    def run(self, stdin: SharedInput) -> RunResult:
        try:
            code = run_process(
                self._job, stdin, on_event=self._event, on_output=self._output.append
            )
        except _Enough:
            code = 0
        error = (self._log.error or explain_exit(code, self._output)) if code else ""
        return self._log.result(exit_code=code, error=error, seconds=0.0)

    def _event(self, line: str) -> None:
        message = json.loads(line)
        read = self._readers.get(message["kind"])
        if read is None:
            self._log.add(message)
        else:
            read(**{name: value for name, value in message.items() if name != "kind"})


def _measure_model(target: Target, watcher: MemoryWatcher) -> Footprint:
    found = _ModelFindings(watcher)
    job = {"script": target.name, "args": (), "policy": "float32"}
    watcher.start(0)
    run = _Process(job | {"task": "model", "optimizer": target.optimizer}, found.readers).run(
        SharedInput()
    )
    found.explain_missing(run)
    watcher.finish(0, _ended(run) or "measured", failed=run.failed)
    return found.footprint(target, run)


class _ModelFindings(Findings):
    """What the process of a model tells."""

    def __init__(self, watcher: MemoryWatcher) -> None:
        super().__init__()
        self._watcher = watcher
        self._batch: int | None = None
        self.readers: dict[str, Callable[..., None]] = {
            "refused": self._refuse,
            "model": self._model,
            "begin": lambda name: watcher.update(0, name),
            "layout": self._layout_found,
            "activations": lambda **values: self.activations.append(Activations(**values)),
        }

    def _refuse(self, error: str) -> None:
        raise UsageError(error)

    def _model(self, trained: list[dict[str, Any]], batch: int | None, has_inputs: bool) -> None:
        self.set_trained(trained)
        self._batch = batch

    def _layout_found(
        self, name: str, kept: dict[str, Any] | None = None, reason: str = ""
    ) -> None:
        if kept:
            self.kept[name] = kept
        else:
            self.unmeasured[name] = reason

    def explain_missing(self, run: RunResult) -> None:
        """Says of the layouts that were never told of that the process has ended."""
        if run.failed:
            for layout in LAYOUTS:
                self.unmeasured.setdefault(layout.name, f"the process was {run.ending}")

    def footprint(self, target: Target, run: RunResult) -> Footprint:
        return Footprint(
            target.name,
            trained=self.trained,
            layouts=tuple(self.layouts()),
            activations=tuple(self.activations),
            batch=self._batch,
            steps=_STEPS,
            error=run.error,
            device=run.device,
            versions=run.versions,
        )


class _ScriptFindings(Findings):
    """What the runs of a script tell."""

    steps = 0
    error = ""

    def add(self, policy: str, run: RunResult, last: dict[str, Any]) -> None:
        """Takes one run, and the last thing that it told of what is kept."""
        layout = _SHOWN_BY.get(policy)
        why = _ended(run) or (not last and f"nothing was trained: {why_untrained(run)}") or ""
        if policy == "float32":
            self.error = run.error or why
            self.set_trained(last.get("trained", []))
            self.steps = last.get("steps", 0)
        if layout and last:
            self.kept[layout] = last["kept"]
        elif layout:
            self.unmeasured[layout] = why
        reason = "" if run.saved_bytes is not None else why or _NOT_COUNTED
        self.activations.append(Activations(policy, run.saved_bytes, reason=reason))


def _measure_script(target: Target, watcher: MemoryWatcher) -> Footprint:
    found, stdin, runs = _ScriptFindings(), SharedInput(), list[RunResult]()
    for layout in LAYOUTS:
        if layout.name not in _SHOWN_BY.values():
            found.unmeasured[layout.name] = _ONLY_PREDICTED
    for index, policy in enumerate(DEFAULT_POLICIES):
        watcher.start(index)
        run, last = _run_script(target, policy, stdin)
        runs.append(run)
        found.add(policy, run, last)
        text = _ended(run) or f"{last.get('steps', 0)} steps"
        watcher.finish(index, text, failed=run.failed)
        if found.error:
            break
    return Footprint(
        target.name,
        trained=found.trained,
        layouts=tuple(found.layouts()),
        activations=tuple(found.activations),
        steps=found.steps,
        error=found.error,
        device=runs[0].device,
        versions=runs[0].versions,
    )


def _run_script(
    target: Target, policy: str, stdin: SharedInput
) -> tuple[RunResult, dict[str, Any]]:
    last: dict[str, Any] = {}

    def keep(**found: Any) -> None:
        last.update(found)
        if found["steps"] >= _STEPS:
            raise _Enough

    job = {"script": target.name, "args": target.args, "module": target.module}
    return _Process(job | {"policy": policy, "task": "memory"}, {"kept": keep}).run(stdin), last


def _ended(run: RunResult) -> str:
    return run.error.splitlines()[-1] if run.error else ""
