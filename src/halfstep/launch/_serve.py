"""The process of one run: the script as `python SCRIPT` would run it, with a listener."""

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from halfstep.launch._job import Job
from halfstep.launch._recorder import Send
from halfstep.launch._script import Script, script_trace

Task: TypeAlias = Callable[[Job, Send], None]


def serve(tasks: Mapping[str, Task]) -> None:
    """Runs the job that is this process's only argument.

    Args:
        tasks: What there is to do, by the names that jobs have for it.
    """
    job = Job.from_text(sys.argv[1])
    os.set_inheritable(job.events_fd, False)
    tasks[job.task](job, _sender(job.events_fd))


def run_script(job: Job, send: Send) -> None:
    """Runs the script of a job, and tells of the error that ends it."""
    script = Script(job.script, job.args, job.module)
    _make_importable(script.folder)
    with telling_errors(send):
        script.load().run()


@contextlib.contextmanager
def telling_errors(send: Send) -> Iterator[None]:
    """Sends the traceback of an error that leaves the block."""
    try:
        yield
    except Exception as error:
        trace = script_trace(error)
        text = "".join(traceback.format_exception(type(error), error, trace))
        send({"kind": "error", "error": text})
        sys.stdout.flush()  # before the traceback, which Python shows next in the same pipe
        raise


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


def _make_importable(folder: str) -> None:
    """Puts the script's folder first, and halfstep last where it is not installed."""
    sys.path.insert(0, folder)
    own = str(Path(__file__).parents[2])
    if own not in sys.path:
        sys.path.append(own)
