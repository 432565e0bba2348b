"""Runs a script in this process, as plain Python would, and says at its end how it trained."""

import atexit
import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from halfstep.core import AUTO
from halfstep.launch import RunLog, RunResult, Script, Session, first_on_path, script_trace

_INTERRUPTED = 130

Report = Callable[[RunResult], None]


def load_here(script: Script, policy: str, report: Report) -> Callable[[], None]:
    """Returns what runs a script; its errors, its `sys.exit` and an interruption come out of that.

    To be called once, last, and with nothing around it that would catch what comes out.

    Args:
        script: What to run.
        policy: What it trains under; "" stands for `auto`, unless it chooses itself.
        report: Receives the result when the process ends, after all that the script left to do.
    """
    log = _Log(policy or AUTO)
    session = Session(log.add, policy=policy)
    session.start()
    first_on_path(script.folder)
    program = script.load()
    # Registered before the script runs, so called after everything that the script registers.
    atexit.register(_finish, session, log, report)

    def run() -> None:
        with log.noting_the_end():
            program.run()

    return run


@dataclass
class _Log:
    """What is known so far, in the process that was started and in no fork of it.

    Args:
        policy: The policy's text.
    """

    policy: str
    exit_code: int = 0
    error: str = ""
    process: int = field(default_factory=os.getpid)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._log = RunLog(self.policy)

    def add(self, message: dict[str, Any]) -> None:
        if os.getpid() == self.process:
            self._log.add(message)

    @contextlib.contextmanager
    def noting_the_end(self) -> Iterator[None]:
        try:
            yield
        except SystemExit as error:
            self.exit_code = _exit_code(error.code)
            raise
        except BaseException as error:
            self.exit_code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
            trace = script_trace(error)
            self.error = "".join(traceback.format_exception(type(error), error, trace))
            raise

    def result(self) -> RunResult:
        seconds = time.monotonic() - self.started
        return self._log.result(exit_code=self.exit_code, error=self.error, seconds=seconds)


def _exit_code(code: object) -> int:
    """Returns what a process ends with that calls `sys.exit(code)`."""
    if isinstance(code, int):
        return code & 0xFF
    return 0 if code is None else 1


def _finish(session: Session, log: _Log, report: Report) -> None:
    if os.getpid() == log.process:
        session.finish()
        report(log.result())
