"""The benchmarks of training steps, in as few of them as can be."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def rows_of(name, *options):
    command = [sys.executable, str(FOLDER / name), "--rounds", "1", "--steps", "1", *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.strip("| ").split(" | ") for line in printed.splitlines() if "|" in line]
    return lines[2:]


@pytest.mark.slow
def test_a_jitted_step_of_jax():
    pytest.importorskip("jmp")
    pytest.importorskip("optax")
    rows = rows_of("jax_step.py")
    assert len({(model, dtype) for model, dtype, *_ in rows}) == 6
    assert all(float(over) > 0 for *_, over, _, _ in rows)


@pytest.mark.slow
def test_a_step_of_fit_in_keras():
    pytest.importorskip("keras")
    pytest.importorskip("jax")
    rows = rows_of("keras_fit.py", "--backend", "jax")
    assert len({(model, computing) for _, model, computing, *_ in rows}) == 9
    assert all(float(over) > 0 for *_, over in rows)
