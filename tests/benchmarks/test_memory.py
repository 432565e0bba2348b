"""The benchmark for memory, with a tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.slow
def test_each_layout_has_a_row():
    command = [sys.executable, str(SCRIPT), "--quick"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = {cells[1].strip(): cells[2:-1] for cells in map(_cells, printed.splitlines()) if cells}
    assert len(rows) == 8
    for name in ("float32", "torch.amp", "cast masters"):
        assert [float(cell) for cell in rows[name]] == [4, 0, 4, 8, 16, 4]


def _cells(line):
    return line.split("|") if line.startswith("|") else []
