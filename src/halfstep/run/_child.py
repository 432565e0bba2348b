"""The process of one run: the script as `python SCRIPT` would run it, with a listener."""

import atexit
import contextlib
import json
import os
import random
import sys
import traceback
from datetime import UTC, datetime
from importlib.machinery import SourceFileLoader
from pathlib import Path
from platform import python_version
from types import ModuleType, TracebackType
from typing import Any

from halfstep import __version__, core
from halfstep.run._job import Job
from halfstep.run._memory import MemoryGrowth
from halfstep.run._probe import Probe, installed_probe, processor_name
from halfstep.run._recorder import Recorder, Send


def main() -> None:
    """Runs the job that is this process's only argument."""
    job = Job.from_text(sys.argv[1])
    os.set_inheritable(job.events_fd, False)
    probe, send = installed_probe(), _sender(job.events_fd)
    _seed(job.seed, probe)
    _override(job.policy)
    _listen(probe, send)
    _run(job, send)


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


def _seed(seed: int, probe: Probe) -> None:
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    probe.seed(seed)


def _override(policy: str) -> None:
    """Makes the policy win until the process ends, in threads that outlive the script too."""
    stack = contextlib.ExitStack()
    stack.enter_context(core.override_policy(policy))
    atexit.register(stack.close)


def _listen(probe: Probe, send: Send) -> None:
    send({"kind": "start", "versions": _versions(probe), "date": _now()})
    recorder, memory = Recorder(probe, send), MemoryGrowth()
    core.subscribe(recorder)
    # Registered before the script runs, so called after everything that the script registers.
    atexit.register(_finish, recorder, memory, probe, send)


def _finish(recorder: Recorder, memory: MemoryGrowth, probe: Probe, send: Send) -> None:
    recorder.flush()
    peak, kind = probe.peak_memory() or (memory.bytes(), memory.kind)
    device = probe.device() or processor_name()
    send({"kind": "end", "peak_memory": peak, "peak_memory_kind": kind, "device": device})


def _versions(probe: Probe) -> dict[str, str]:
    return {"python": python_version(), "halfstep": __version__} | probe.versions()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _run(job: Job, send: Send) -> None:
    path = os.path.abspath(job.script)
    sys.argv = [job.script, *job.args]
    _make_importable(os.path.dirname(os.path.realpath(path)))
    try:
        _execute(path)
    except Exception as error:
        _report(error, send)
        sys.exit(1)


def _make_importable(folder: str) -> None:
    """Puts the script's folder first, and halfstep last where it is not installed."""
    sys.path.insert(0, folder)
    own = str(Path(__file__).parents[2])
    if own not in sys.path:
        sys.path.append(own)


def _execute(path: str) -> None:
    """Runs a file as `__main__`.

    Not `runpy.run_path`: it takes `__main__` away again when the file ends, before the threads
    and exit handlers of the script have run, and ties `sys.argv[0]` to `__file__`.
    """
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    code = compile(loader.get_data(path), path, "exec", dont_inherit=True)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _report(error: Exception, send: Send) -> None:
    """Shows the traceback that plain python would show, and sends it."""
    trace = _below_this_file(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, trace))
    send({"kind": "error", "error": text})
    sys.stdout.flush()
    sys.excepthook(type(error), error, trace)


def _below_this_file(trace: TracebackType | None) -> TracebackType | None:
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
