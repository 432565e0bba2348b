"""Ends a command that runs on a terminal, as its user or a scheduler would."""

import contextlib
import os
import pty
import subprocess
import sys

import pytest

# What a script does at its end, so that it is known to be there when it is ended.
WAITING = " import os, signal; print('pid', os.getpid(), 'x', flush=True); signal.pause()\n"
_COMMAND = [sys.executable, "-c", "import sys; from halfstep.cli import main; sys.exit(main())"]


def interrupted(arguments, number):
    """Returns the exit code and the output of a command that gets a signal, and leaves nothing.

    Args:
        arguments: Those of the command, `--verbose` among them, with a script that waits.
        number: The signal.
    """
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        [*_COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=side,
        stderr=side,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm"},
    )
    os.close(side)
    shown = _read_until(terminal, " x")
    child = int(shown.split("pid ")[1].split()[0])
    process.send_signal(number)
    shown += _read_until(terminal, None)
    os.close(terminal)
    code = process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    return code, shown


def _read_until(terminal, mark):
    shown = ""
    with contextlib.suppress(OSError):  # how Linux tells that the other side is closed
        while (chunk := os.read(terminal, 4096)) and (mark is None or mark not in shown):
            shown += chunk.decode()
            if mark and mark in shown:
                break
    return shown
