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
from halfstep.run import RunResult

pytest.importorskip("torch")

SCRIPTS = Path(__file__).parents[1] / "scripts"
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


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


LSTM = "word_language_model.py --epochs 1"
LLAMA = "hf.py --model llama --attention eager --steps 40"
TRAININGS = {
    "mnist": Training("mnist.py --epochs 6", 138, 0.038),
    "lstm": Training(LSTM, 127, 0.023),
    "tied lstm": Training(f"{LSTM} --tied", 127, 0.045),
    "gan": Training("gan.py --niter 3", 87, 0.036, optimizers=2),
    "gpt2": Training("hf.py --steps 40", 40, 0.022, factor=0.5),
    "llama": Training(LLAMA, 40, 0.026, factor=0.5),
    "package": Training("-m pkg --steps 8", 8, 0.0013),
}


def plain_losses(training):
    """Returns every loss that the script prints under plain Python."""
    command = [sys.executable, "-W", "error", *training.words.split()]
    done = subprocess.run(command, cwd=SCRIPTS, check=True, capture_output=True, text=True)
    return [float(text) * training.factor for text in re.findall(r"loss (\S+)", done.stdout)]


def runs_of(training, target):
    """Returns what `compare` finds out about a script, policy by policy."""
    policies = chain(*(("--policy", policy) for policy in POLICIES))
    module, *rest = training.words.removeprefix("-m ").split()
    script = ("-m", module) if training.words.startswith("-m ") else (module,)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(SCRIPTS)
        assert main(["compare", *policies, "--json", str(target), *script, "--", *rest]) == 0
    return [RunResult.from_dict(run) for run in json.loads(target.read_text())["runs"]]


@pytest.fixture(scope="module", params=TRAININGS)
def compared(request, tmp_path_factory):
    """Returns a training, the losses of plain Python, and the runs of `compare`."""
    training = TRAININGS[request.param]
    if training.words.startswith("hf.py"):
        pytest.importorskip("transformers")
    target = tmp_path_factory.mktemp("compare") / "out.json"
    return training, plain_losses(training), runs_of(training, target)


@pytest.mark.slow
def test_the_float32_run_is_plain_python(compared):
    _, losses, (full, *_) = compared
    assert list(full.losses) == losses


@pytest.mark.slow
def test_every_step_is_counted(compared):
    training, _, runs = compared
    for run in runs:
        assert run.steps == training.steps
        assert run.optimizer_steps == training.steps * training.optimizers
        assert run.scalers == training.optimizers


@pytest.mark.slow
def test_the_curves_agree(compared):
    """Rounding is noise like a seed's: two seeds are further apart than 3 deviations in 1 of 30."""
    training, _, (full, *lower) = compared
    for run in lower:
        assert run.losses[0] == pytest.approx(full.losses[0], rel=0.01)
        assert run.last_loss == pytest.approx(full.last_loss, abs=3 * training.noise)


@pytest.mark.slow
def test_at_most_two_steps_are_skipped(compared):
    *_, runs = compared
    assert [len(run.skipped) for run in runs[:2]] == [0, 0]
    assert len(runs[2].skipped) <= 2


@pytest.mark.slow
def test_lower_precision_is_at_work(compared):
    _, _, (full, *lower) = compared
    for run in lower:
        assert run.losses != full.losses
        assert run.saved_bytes < full.saved_bytes


def test_no_script_knows_halfstep():
    sources = list(SCRIPTS.rglob("*.py"))
    assert len(sources) >= 6
    assert not [path for path in sources if "halfstep" in path.read_text()]
