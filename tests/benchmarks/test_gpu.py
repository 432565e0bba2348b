"""The benchmark for accelerators, tried out without one, so that it runs when there is one."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.slow
def test_everything_is_measured(tmp_path):
    figures = tmp_path / "figures.json"
    options = ["--device", "cpu", "--quick", "--json", str(figures)]
    command = [sys.executable, str(SCRIPT), *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = json.loads(figures.read_text())["rows"]
    # Three models, eager and compiled, in two dtypes.
    assert len({(row["model"], row["way"], row["dtype"]) for row in rows}) == 12
    assert all(row["over"]["torch.amp"]["ratio"] > 0 for row in rows)
    alone, region = map(float, re.findall(r"([\d.]+)%", printed.splitlines()[-1]))
    assert alone > 50 > 0.1 > region


@pytest.mark.slow
def test_what_there_is_no_time_for_is_left_out():
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--quick", "--minutes", "0"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.count("left out for lack of time") == 6
