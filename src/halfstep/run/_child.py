"""The process of one run: the script as `python SCRIPT` would run it, with a listener."""

import atexit
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halfstep.run._job import Job
from halfstep.run._recorder import Send
from halfstep.run._script import Script, script_trace
from halfstep.run._session import Session


def main() -> None:
    """Runs the job that is this process's only argument."""
    job = Job.from_text(sys.argv[1])
    os.set_inheritable(job.events_fd, False)
    _TASKS[job.task](job, _sender(job.events_fd))


def _train(job: Job, send: Send) -> None:
    session = Session(send, policy=job.policy, seed=job.seed, memory=job.task == "memory")
    session.start()
    # Registered before the script runs, so called after everything that the script registers.
    atexit.register(session.finish)
    _run(Script(job.script, job.args, job.module), send)


def _sender(descriptor: int) -> Send:
    process = os.getpid()

    def send(message: dict[str, Any]) -> None:
        if os.getpid() != process:
            return  # A forked worker of the script: its steps are not this run's.
        line = (json.dumps(message) + "\n").encode()
        try:
            while line:
                line = line[os.write(descriptor, line) :]
        except BrokenPipeError:
            os._exit(1)  # The parent is gone: nobody will read what this run finds out.

    return send


def _run(script: Script, send: Send) -> None:
    _make_importable(script.folder)
    with _telling_errors(send):
        script.load().run()


def _measure(job: Job, send: Send) -> None:
    from halfstep.run._model_child import measure_model

    with _telling_errors(send):
        measure_model(job, send)


_TASKS = {"train": _train, "memory": _train, "model": _measure}


@contextlib.contextmanager
def _telling_errors(send: Send) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        trace = script_trace(error)
        text = "".join(traceback.format_exception(type(error), error, trace))
        send({"kind": "error", "error": text})
        sys.stdout.flush()  # before the traceback, which Python shows next in the same pipe
        raise


def _make_importable(folder: str) -> None:
    """Puts the script's folder first, and halfstep last where it is not installed."""
    sys.path.insert(0, folder)
    own = str(Path(__file__).parents[2])
    if own not in sys.path:
        sys.path.append(own)
