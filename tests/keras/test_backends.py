"""Runs the tests of this folder, and the examples of halfstep.keras, in a process per backend."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "tensorflow", "torch"])
def test_on_backend(backend):
    for package in ("keras", backend):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    # Workers of pytest-xdist hand their own settings on.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**kept, "KERAS_BACKEND": backend, "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0"]
    run = subprocess.run(
        [*command, "tests/keras", "src/halfstep/keras"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
