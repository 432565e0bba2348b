import subprocess
import sys
from pathlib import Path

import pytest

from tests.keras.loops import BACKEND

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="replicas are TensorFlow's")
@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_an_overflow_in_one_replica_skips_the_step_in_all(way):
    # A process decides how many devices it has before TensorFlow starts.
    command = [sys.executable, "-m", "tests.keras.replicas", way]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    # The replicas' gradients are summed: 8 / 8 in the first step, 6 / 4 in the third.
    scaled, masters = run.stdout.splitlines()
    counts = "StepCounts(steps=3, skipped=1, consecutive_skips=0, scale=4.0)"
    assert scaled == f"[254.75] {counts}"
    assert masters == "[255.0] [254.75]"
