"""The example scripts, run as a user runs them, only shorter."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

# script, arguments that make it short, what it prints, the range that the result is in
RUNS = [
    ("digits.py", ["--epochs", "2"], r"held-out accuracy (0\.\d{4})\n", 0.85, 1.0),
    ("jax_digits.py", ["--epochs", "2"], r"held-out accuracy (0\.\d{4})\n", 0.85, 1.0),
    ("keras_digits.py", ["--epochs", "3"], r"held-out accuracy (0\.\d{4})\n", 0.85, 1.0),
    ("bytelm.py", ["--steps", "20"], r"held-out loss (\d\.\d{4}) bits per byte\n", 3.0, 6.0),
]
NAMES = [run[0] for run in RUNS]


def printed(script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    environment = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("script", "short", "pattern", "low", "high"), RUNS, ids=NAMES)
def test_example_trains_and_repeats(script, short, pattern, low, high):
    framework = script.partition("_")[0]
    if framework in ("keras", "jax") and find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    first = printed(script, *short, "--seed", "1")
    assert low <= float(re.fullmatch(pattern, first)[1]) <= high
    assert printed(script, *short, "--seed", "1") == first


@pytest.mark.parametrize("script", NAMES)
def test_example_is_short(script):
    assert len((EXAMPLES / script).read_text().splitlines()) <= 130


def test_every_example_is_tested():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(NAMES)
