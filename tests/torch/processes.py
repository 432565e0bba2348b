"""New processes for tests."""

import os
import subprocess
import sys


def process(code):
    """Returns the words that a new process prints."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.split()


def command(path, script):
    """Writes a shell script, and returns the command that runs it."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)
