"""The benchmark of plans, with one model and little time."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan.py"


@pytest.mark.slow
def test_a_model_has_a_row():
    command = [sys.executable, str(SCRIPT), "--model", "LSTM", "--rounds", "2", "--seconds", "0.2"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    cells = [each.strip() for each in printed.splitlines()[-1].strip("|").split("|")]
    assert cells[0] == "LSTM"
    # PyTorch has no LSTM in float16 on a CPU.
    assert [each.split()[-1] for each in cells[1:6]] == ["ms", "ms", "cannot", "ms", "ms"]
    assert float(cells[6].split()[0]) > 0
    assert cells[7].split(",")[0] in ("float32", "bfloat16", "float16")
    assert float(cells[8].split()[0]) > 0
    assert cells[9] in ("float32", "autocast bfloat16", "autocast float16")
