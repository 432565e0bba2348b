"""Measures the memory of a target, each measurement in a process of its own."""

import json
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from halfstep.launch import RunLog, RunResult, SharedInput, explain_exit, run_process
from halfstep.run._compare import CHILD, DEFAULT_POLICIES
from halfstep.run._findings import ModelFindings, ScriptFindings, ended
from halfstep.run._footprint import Footprint
from halfstep.run._target import Target

_KEPT_LINES = 20


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
                self._job,
                stdin,
                child=CHILD,
                on_event=self._event,
                on_output=self._output.append,
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
    found = ModelFindings(lambda name: watcher.update(0, name))
    job = {"script": target.name, "args": (), "policy": "float32"}
    job |= {"task": "model", "optimizer": target.optimizer}
    watcher.start(0)
    run = _Process(job, found.readers).run(SharedInput())
    found.end(run)
    watcher.finish(0, ended(run) or "measured", failed=run.failed)
    return found.footprint(target.name, run)


def _measure_script(target: Target, watcher: MemoryWatcher) -> Footprint:
    found, stdin, first = ScriptFindings(), SharedInput(), None
    for index, policy in enumerate(DEFAULT_POLICIES):
        watcher.start(index)
        run, last = _run_script(target, policy, stdin)
        first = first or run
        found.add(policy, run, last)
        text = ended(run) or f"{last.get('steps', 0)} steps"
        watcher.finish(index, text, failed=run.failed)
        if found.error:
            break
    assert first is not None
    return found.footprint(target.name, first)


def _run_script(
    target: Target, policy: str, stdin: SharedInput
) -> tuple[RunResult, dict[str, Any]]:
    last: dict[str, Any] = {}

    def keep(**found: Any) -> None:
        last.update(found)
        if found["last"]:
            raise _Enough

    job = {"script": target.name, "args": target.args, "module": target.module}
    return _Process(job | {"policy": policy, "task": "memory"}, {"kept": keep}).run(stdin), last
