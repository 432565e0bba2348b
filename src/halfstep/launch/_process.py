"""One child process: started, listened to, and stopped with all that it started."""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from halfstep.launch._job import Job
from halfstep.launch._stdin import SharedInput

_CHUNK = 65536
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0
_HALFSTEP = str(Path(__file__).parents[1] / "__init__.py")
# Takes exactly this halfstep, and leaves sys.path to the script.
_BOOT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("halfstep", sys.argv.pop(1))
sys.modules["halfstep"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["halfstep"])
import importlib
importlib.import_module(sys.argv.pop(1)).main()
"""

OnLine = Callable[[str], None]


def run_process(
    job: Mapping[str, Any],
    stdin: SharedInput,
    *,
    child: str,
    on_event: OnLine,
    on_output: OnLine,
) -> int:
    """Runs one job to its end and returns the process's exit code.

    An interruption reaches it, too, and comes out of here once it has ended.

    Args:
        job: The fields of `Job`, the descriptor apart.
        stdin: What the script reads.
        child: The name of the module whose `main` does the job in the process.
        on_event: Receives each line that the recorder sends.
        on_output: Receives each line that the script prints, errors included.
    """
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as events:
        try:
            process = _start(Job(**job, events_fd=writer), stdin, child)
        finally:
            os.close(writer)
        assert process.stdout is not None
        lines = {events.fileno(): _Lines(on_event), process.stdout.fileno(): _Lines(on_output)}
        try:
            _listen(process, lines)
            return process.wait()
        except KeyboardInterrupt:
            # It ends as under plain Python, and what it says meanwhile is heard.
            _signal_group(process, signal.SIGINT)
            _listen(process, lines, seconds=_GRACE_SECONDS)
            raise
        finally:
            _stop(process)
            process.stdout.close()


def _start(job: Job, stdin: SharedInput, child: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        # -P: under `python SCRIPT` the working directory is not on sys.path either.
        [sys.executable, "-P", "-c", _BOOT, _HALFSTEP, child, job.to_text()],
        stdin=stdin.for_process(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(job.events_fd,),
        env=_environment(job.seed),
        start_new_session=True,  # Ctrl-C reaches the parent alone, which then stops the group.
    )
    stdin.feed(process.stdin)
    return process


def _environment(seed: int) -> dict[str, str]:
    defaults = {"PYTHONIOENCODING": "utf-8", "PYTHONHASHSEED": str(seed % 2**32)}
    return defaults | os.environ


def _listen(
    process: subprocess.Popen[bytes], lines: Mapping[int, "_Lines"], *, seconds: float = math.inf
) -> None:
    """Hands on lines until both pipes end, or the process has ended and both are quiet."""
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        for descriptor, reader in lines.items():
            selector.register(descriptor, selectors.EVENT_READ, reader)
        while selector.get_map() and time.monotonic() < deadline:
            # Asked before select: what the process wrote before it ended is then read.
            ended = process.poll() is not None
            ready = selector.select(_POLL_SECONDS)
            for key, _ in ready:
                if not _read_into(key.data, key.fd):
                    selector.unregister(key.fd)
            if ended and not ready:
                break
        for key in selector.get_map().values():
            key.data.end()


def _read_into(lines: "_Lines", descriptor: int) -> bool:
    chunk = os.read(descriptor, _CHUNK)
    lines.feed(chunk) if chunk else lines.end()
    return bool(chunk)


class _Lines:
    """Splits what arrives in pieces into lines of text."""

    def __init__(self, on_line: OnLine) -> None:
        self._on_line, self._rest = on_line, b""

    def feed(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._emit(line)

    def end(self) -> None:
        if self._rest:
            self._emit(self._rest)
        self._rest = b""

    def _emit(self, line: bytes) -> None:
        # A progress bar rewrites its line with carriage returns: the last version is the line.
        text = line.decode("utf-8", errors="replace").rstrip("\r")
        self._on_line(text.rpartition("\r")[2])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that still runs, and its group: first politely."""
    if process.poll() is not None:
        return
    _signal_group(process, signal.SIGTERM)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _signal_group(process, signal.SIGKILL)
        process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
