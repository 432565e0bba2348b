"""The whole way, with a real model: what the table says comes from halfstep.torch."""

import json

import pytest

from halfstep.cli import main
from halfstep.launch import RunResult
from tests.launch.scripts import write

pytest.importorskip("torch")

SCRIPT = """
import torch
import torch.nn.functional as F
from torch import nn

import halfstep
from halfstep.torch import GradScaler, autocast

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cpu", init_scale=2.0**40)
inputs, targets = torch.rand(256, 64), torch.arange(256) % 4
for _ in range(40):
    optimizer.zero_grad()
    with autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(inputs), targets)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
halfstep.metric("accuracy", (model(inputs).argmax(1) == targets).float().mean())
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    policies = ("float32", "mixed_bfloat16", "compute_dtype=float16,scale=static(1e30)")
    options = [word for policy in policies for word in ("--policy", policy)]
    script, target = write(folder / "train.py", SCRIPT), folder / "out.json"
    assert main(["compare", script, *options, "--json", str(target)]) == 0
    return [RunResult.from_dict(run) for run in json.loads(target.read_text())["runs"]]


@pytest.mark.slow
def test_the_policy_of_the_command_wins(runs):
    assert [run.scale for run in runs] == [1.0, 1.0, pytest.approx(1e30)]
    assert runs[0].losses[0] != runs[1].losses[0] == pytest.approx(runs[0].losses[0], rel=0.05)


@pytest.mark.slow
def test_everything_is_measured(runs):
    for run in runs:
        assert (run.steps, len(run.losses), len(run.step_seconds)) == (40, 40, 39)
        assert run.steps_per_second > 0
        assert run.peak_memory > 0
        assert "accuracy" in run.last_metrics
        assert "torch" in dict(run.versions)


@pytest.mark.slow
def test_half_precision_saves_less_for_backward(runs):
    assert runs[1].saved_bytes < 0.8 * runs[0].saved_bytes


@pytest.mark.slow
def test_skipped_steps_come_with_reasons(runs):
    full, bfloat16, too_high = runs
    assert full.skipped == bfloat16.skipped == ()
    assert [skip.step for skip in too_high.skipped] == list(range(1, 41))
    assert "inf" in too_high.skipped[0].reason or "nan" in too_high.skipped[0].reason


TWO_SCALERS = """
import torch
from torch import nn

from halfstep.torch import GradScaler, autocast

torch.set_num_threads(1)
models = [nn.Linear(64, 64), nn.Linear(64, 64)]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
scalers = [GradScaler("cpu") for _ in range(SCALERS)]
for _ in range(6):
    for index in range(2):
        scaler = scalers[index % SCALERS]
        with autocast("cpu"):
            loss = models[index](torch.rand(32, 64)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers[index])
        if SCALERS == 2 or index:
            scaler.update()
"""


@pytest.mark.slow
def test_two_scalers_are_counted_like_one_with_two_optimizers(tmp_path, capsys):
    both = {}
    for scalers in (1, 2):
        text = TWO_SCALERS.replace("SCALERS", str(scalers))
        target = tmp_path / f"{scalers}.json"
        script = write(tmp_path / f"{scalers}.py", text)
        assert main(["compare", script, "--policy", "mixed_float16", "--json", str(target)]) == 0
        both[scalers] = RunResult.from_dict(json.loads(target.read_text())["runs"][0])
    one, two = both[1], both[2]
    assert (one.scalers, two.scalers) == (1, 2)
    assert one.steps == two.steps == 6
    assert one.optimizer_steps == two.optimizer_steps == 12
    assert len(one.step_seconds) == len(two.step_seconds) == 5
    assert two.saved_bytes == pytest.approx(one.saved_bytes, rel=0.01)
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("2 optimizers or GradScalers: steps/s, saved for backward and") == 1
