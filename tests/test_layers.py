"""Importing the parts that know no framework loads none, which is checked in a fresh process."""

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "tensorflow", "keras", "jax", "flax")
HEAVY = ("numpy", "ml_dtypes", "rich", "typer")
EXTRAS = ("jinja2", "plotly")
COMMAND_LINE = [f"halfstep.{name}" for name in ("cli", "run", "diagnose", "launch", "report")]


def loaded_by(module, watched):
    code = f"import sys, {module}; print(*set({watched!r}) & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PATH": ""},
    )
    return run.stdout.split()


@pytest.mark.parametrize("module", ["halfstep", "halfstep.core", "halfstep.errors"])
def test_importing_loads_no_framework_and_nothing_heavy(module):
    assert loaded_by(module, FRAMEWORKS + HEAVY) == []


@pytest.mark.parametrize("module", COMMAND_LINE)
def test_importing_the_command_line_loads_no_framework_and_nothing_of_an_extra(module):
    assert loaded_by(module, FRAMEWORKS + EXTRAS) == []


def test_the_tests_above_can_fail():
    assert loaded_by("numpy", HEAVY) == ["numpy"]
    pytest.importorskip("torch")
    assert "torch" in loaded_by("torch", FRAMEWORKS)
