"""Scripts that know nothing of halfstep, compared: they train alike, and nothing else changes."""

import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

from halfstep.cli import main
from halfstep.launch import RunResult

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parents[1] / "scripts"
# By default a CPU keeps float16 convolutions in float32; CUDA's rules do not.
CONVOLUTIONS_TOO = "compute_dtype=float16, rules=torch-2.13, scale=dynamic"


class Training(NamedTuple):
    """A script, how long it is run for, and how far seeds take its last loss apart.

    `noise` is the standard deviation of `last_loss` over the seeds 0 to 5 of plain float32.
    `factor` is what the script multiplies its printed loss by before it calls backward.
    """

    words: str  # as after "python"
    steps: int
    noise: float
    optimizers: int = 1
    factor: float = 1.0
    float16: str = "mixed_float16"

    def plain_losses(self):
        """Returns every loss that the script prints under plain Python, warnings being errors."""
        command = [sys.executable, "-W", "error", *self.words.split()]
        done = subprocess.run(command, cwd=SCRIPTS, check=True, capture_output=True, text=True)
        found = re.findall(r"loss ([\d.e+-]+)", done.stdout)
        return tuple(float(text) * self.factor for text in found)

    def compared(self, target):
        """Returns what `compare` finds out, policy by policy."""
        names = "float32", "mixed_bfloat16", self.float16
        policies = chain(*(("--policy", name) for name in names))
        of_module = self.words.startswith("-m ")
        script, *rest = self.words.removeprefix("-m ").split()
        words = ["-m"] * of_module + [script, "--", *rest]
        assert main(["compare", *policies, "--json", str(target), *words]) == 0
        return [RunResult.from_dict(run) for run in json.loads(target.read_text())["runs"]]


LSTM = "word_language_model.py --epochs 1 --length 32768"
LLAMA = "hf.py --model llama --attention eager --steps 30"
TRAININGS = {
    "mnist": Training("mnist.py --epochs 3", 69, 0.073, float16=CONVOLUTIONS_TOO),
    "lstm": Training(LSTM, 63, 0.0091),
    "tied lstm": Training(f"{LSTM} --tied", 63, 0.018),
    "gan": Training("gan.py --niter 2", 58, 0.024, optimizers=2, float16=CONVOLUTIONS_TOO),
    "gpt2": Training("hf.py --steps 30", 30, 0.0089, factor=0.5),
    "llama": Training(LLAMA, 30, 0.024, factor=0.5),
    "package": Training("-m pkg --steps 4", 4, 0.010),
}


def check_every_step_is_counted(training, run):
    assert run.steps == training.steps
    assert run.optimizer_steps == training.steps * training.optimizers
    assert run.scalers == training.optimizers


def check_the_curves_agree(training, run, full):
    """Rounding is noise like a seed's: two seeds are further apart than 3 deviations in 1 of 30."""
    assert run.losses[0] == pytest.approx(full.losses[0], rel=0.01)
    assert run.last_loss == pytest.approx(full.last_loss, abs=3 * training.noise)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_a_script_trains_alike(name, tmp_path, monkeypatch):
    if name in ("gpt2", "llama"):
        pytest.importorskip("transformers")
    monkeypatch.chdir(SCRIPTS)
    training = TRAININGS[name]
    runs = full, bfloat16, float16 = training.compared(tmp_path / "out.json")
    for run in runs:
        check_every_step_is_counted(training, run)
        check_the_curves_agree(training, run, full)
    assert full.losses == training.plain_losses()
    assert len({run.losses for run in runs}) == 3
    assert bfloat16.saved_bytes < full.saved_bytes
    assert full.skipped == bfloat16.skipped == ()
    assert len(float16.skipped) <= 2


def test_no_script_knows_halfstep():
    sources = list(SCRIPTS.rglob("*.py"))
    assert len(sources) >= 6
    assert not [path for path in sources if "halfstep" in path.read_text()]
