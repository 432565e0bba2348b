"""Runs files of this folder in a process with other flags of XLA."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def passes(name, *, flags, optimized=False):
    """Returns whether the tests of a file pass in a process with these flags.

    Without `optimized` the flags are beside those of this process.
    """
    # Workers of pytest-xdist hand their own settings on.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    usual = "" if optimized else os.environ["XLA_FLAGS"]
    run = subprocess.run(
        [*command, f"tests/jax/{name}"],
        cwd=ROOT,
        env={**kept, "XLA_FLAGS": f"{usual} {flags}"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return " passed" in run.stdout
