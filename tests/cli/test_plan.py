"""The whole way: a script is measured in a process of its own, and its plan is written."""

import json
import signal

import pytest

from halfstep import Plan
from halfstep.cli import main
from tests.cli.interrupting import WAITING, interrupted
from tests.launch.scripts import write

pytest.importorskip("torch")

SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.rand(16, 64)), torch.randint(4, (16,)))
    loss.backward()
    optimizer.step()
    print("step", step)
    if step == 20:
        raise RuntimeError("was not stopped")
"""
PREPARED = SCRIPT.replace(
    "for step", "import halfstep.torch\nhalfstep.torch.prepare(model, optimizer)\nfor step"
)


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    write(tmp_path / "train.py", SCRIPT)


def test_a_script_gets_a_plan(tmp_path, capsys):
    code = main(["plan", "train.py", "--seconds", "0.2", "--json", "plan.json", "--", "100"])
    text = capsys.readouterr().out
    assert code == 0
    plan = Plan.load(tmp_path / "plan.toml")
    assert "float32" in {each.policy for each in plan.candidates}
    assert plan.machine.device == "cpu"
    assert json.loads((tmp_path / "plan.json").read_text()) == plan.to_dict()
    assert "kept for backward" in text
    assert "halfstep: wrote plan.toml" in text


def test_a_plan_is_a_policy_of_a_run(tmp_path, capsys):
    text = (
        '[policy]\ncompute_dtype = "bfloat16"\nscale = "none"\n[machine]\ndevice = "tpu"\nname = ""'
    )
    (tmp_path / "mine.toml").write_text(text)
    assert (
        main(["compare", "train.py", "--policy", "float32", "--policy", "mine.toml", "--", "3"])
        == 0
    )
    assert "mine.toml" in capsys.readouterr().out


def test_a_script_that_ends_before_says_so(capsys):
    assert main(["plan", "train.py", "--", "2"]) == 1
    assert "ended after 2 steps, before step 3. Write --step 2" in capsys.readouterr().out


def test_a_script_that_exits_before_says_so(tmp_path, capsys):
    write(tmp_path / "train.py", SCRIPT + "sys.exit(0)\n")
    assert main(["plan", "train.py", "--", "2"]) == 1
    assert "ended after 2 steps" in capsys.readouterr().out


def test_a_script_that_fails_says_why(capsys):
    assert main(["plan", "train.py", "--", "none"]) == 1
    assert "invalid literal for int()" in capsys.readouterr().out


def test_a_script_without_steps_says_what_is_known(tmp_path, capsys):
    write(tmp_path / "idle.py", "import torch")
    assert main(["plan", "idle.py"]) == 1
    assert "no step of an optimizer was seen" in capsys.readouterr().out


def test_a_model_that_is_prepared_is_refused(tmp_path, capsys):
    write(tmp_path / "prepared.py", PREPARED)
    assert main(["plan", "prepared.py", "--", "9"]) == 1
    assert "nobody has prepared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--step", "0"], "--step above 0, got 0. Write --step 3"),
        (["--seconds", "-1"], "--seconds above 0, got -1"),
        (["--budget", "0"], "--budget above 0, got 0"),
        (["-o", "nowhere/plan.toml"], "nowhere"),
        (["-o", "train.py"], "train.py"),
        (["-o", "plan"], "--output to end in .toml"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(given, says, capsys):
    assert main(["plan", "train.py", *given, "--", "9"]) == 2
    assert says in capsys.readouterr().err


def test_an_option_of_the_script_needs_two_dashes(capsys):
    assert main(["plan", "train.py", "--epochs", "1"]) == 2
    assert "halfstep plan SCRIPT -- ..." in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_it_leaves_no_process_and_no_plan(tmp_path, number):
    script = write(tmp_path / "waits.py", f"if True:{WAITING}")
    code, shown = interrupted(["plan", script, "--verbose"], number)
    assert code == 130
    assert "halfstep: interrupted" in shown
    assert not (tmp_path / "plan.toml").exists()


def test_without_pytorch(monkeypatch, capsys):
    monkeypatch.setattr("halfstep.cli._plan.find_spec", lambda name: None)
    assert main(["plan", "train.py"]) == 2
    assert "pip install 'halfstep[torch]'" in capsys.readouterr().err
