import json
import os
import signal
import sys

import pytest

from halfstep.cli import main
from halfstep.launch import RunResult
from tests.cli.interrupting import WAITING, interrupted
from tests.launch.scripts import TRAINING, write


@pytest.fixture(autouse=True)
def _fast(no_framework, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def training(tmp_path):
    return write(tmp_path / "train.py", TRAINING)


def test_the_table_and_the_verdict(training, capsys):
    assert main(["compare", training, "--policy", "float32", "--policy", "mixed_float16"]) == 0
    out, err = capsys.readouterr()
    for piece in ("policy", "float32", "mixed_float16", "last loss", "0.97", "1 of 20", "65536"):
        assert piece in out
    assert "\nmixed_float16: " in out
    assert "the same accuracy (noise unknown: run with --seeds 3)" in " ".join(out.split())
    assert "float32, seed 0: done in" in err
    assert "\x1b" not in out + err
    assert max(map(len, out.splitlines())) <= 80


def test_a_script_for_torch_amp_is_not_called_one_in_float32(tmp_path, capsys):
    text = TRAINING.replace('emit("loss",', 'emit("loss", source="scale",')
    script = write(tmp_path / "train.py", text)
    note = "the script has a torch.amp.GradScaler: float32 is the script as it is"
    for policy, told in (("float32", True), ("mixed_float16", False)):
        assert main(["compare", script, "--policy", policy]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) is told


@pytest.mark.slow
def test_a_policy_that_did_not_take_effect(tmp_path, capsys, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    text = """
        import torch
        weight = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
    """
    policies = ["--policy", "float32", "--policy", "mixed_float16"]
    assert main(["compare", write(tmp_path / "train.py", text), *policies]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mixed_float16: did not take effect, because no model became a region: every" in out
    assert out.count("Only modules that are called become regions") == 1


def test_a_wide_terminal_gets_a_line_per_policy(training, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    main(["compare", training, "--policy", "float32", "--policy", "mixed_float16"])
    lines = capsys.readouterr().out.splitlines()
    heads = next(line for line in lines if line.startswith("policy"))
    assert "steps/s" in heads
    assert "last scale" in heads


def test_several_seeds(training, capsys):
    policies = ["--policy", "float32", "--policy", "mixed_bfloat16"]
    assert main(["compare", training, *policies, "--seeds", "2", "--seed", "7"]) == 0
    out, err = capsys.readouterr()
    assert "±" in out
    assert "half the range over 2 seeds" in out
    assert "mixed_bfloat16, seed 8: done" in err


def test_json(training, tmp_path, capsys):
    path = tmp_path / "out.json"
    arguments = ["--policy", "float32", "--json", str(path), "--", "--lr", "1"]
    assert main(["compare", training, *arguments]) == 0
    data = json.loads(path.read_text())
    assert data["args"] == ["--lr", "1"]
    assert RunResult.from_dict(data["runs"][0]).steps == 20
    capsys.readouterr()


def test_json_to_standard_output(training, capsys):
    assert main(["compare", training, "--policy", "float32", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["runs"][0]["steps"] == 20
    assert "last loss" in err


def test_a_failing_run(tmp_path, capsys):
    text = TRAINING + "\nprint('about to fail')\nassert not low, 'too low [bold]'"
    script = write(tmp_path / "train.py", text)
    assert main(["compare", script, "--policy", "float32", "--policy", "mixed_float16"]) == 1
    out, err = capsys.readouterr()
    assert "mixed_float16: failed in 1 of 1 runs" in out
    assert "mixed_float16 seed 0 failed (exit code 1):" in out
    assert "AssertionError: too low [bold]" in out
    assert "mixed_float16, seed 0: failed after" in err
    assert "about to fail" not in out + err


def test_all_runs_fail(tmp_path, capsys):
    script = write(tmp_path / "train.py", "1 / 0")
    assert main(["compare", script, "--policy", "float32"]) == 1
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_a_failure_that_is_the_same_in_every_run_is_shown_once(tmp_path, capsys):
    script = write(tmp_path / "train.py", "class Model: pass\nraise ValueError(repr(Model()))")
    assert main(["compare", script, "--policy", "float32", "--policy", "mixed_float16"]) == 1
    out = capsys.readouterr().out
    assert "\nall 2 runs failed (exit code 1, the same in each):\n" in out
    assert out.count("Traceback") == 1


def test_some_runs_that_fail_in_the_same_way_are_named(tmp_path, capsys):
    text = TRAINING + "\nassert not low, 'too low'"
    script = write(tmp_path / "train.py", text)
    policies = ["--policy", "float32", "--policy", "mixed_float16"]
    assert main(["compare", script, *policies, "--seeds", "2"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    who = "mixed_float16 seed 0, mixed_float16 seed 1"
    assert f"{who} failed (exit code 1, the same in each):" in out
    assert out.count("AssertionError: too low") == 1


def test_a_signal_is_named(tmp_path, capsys):
    script = write(tmp_path / "train.py", "import os; os.kill(os.getpid(), 9)")
    assert main(["compare", script, "--policy", "float32"]) == 1
    out, err = capsys.readouterr()
    assert "float32 seed 0 failed (killed by SIGKILL):" in out
    assert "killed by SIGKILL. The system may have run out of memory." in err
    assert "-9" not in out + err


def test_verbose_shows_what_the_script_prints(tmp_path, capsys):
    script = write(tmp_path / "train.py", TRAINING + r"print('\x1b[31m[red] epoch\x1b[0m')")
    assert main(["compare", script, "--policy", "float32", "--verbose"]) == 0
    out, err = capsys.readouterr()
    assert "[red] epoch\n" in err
    assert "\x1b" not in out + err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither PyTorch nor Keras was imported"),
        (
            "from halfstep import core; core.emit('loss', value=1.0)",
            "losses were scaled, but neither backward() nor an optimizer step followed",
        ),
    ],
)
def test_nothing_trained(tmp_path, capsys, text, reason):
    script = write(tmp_path / "train.py", text)
    assert main(["compare", script, "--policy", "float32"]) == 1
    out = "".join(capsys.readouterr().out.split())  # the console folds a long path anywhere
    wanted = f"nothing was trained in {script}: {reason}."
    assert "".join(wanted.split()) in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["missing.py"], "got 'missing.py', which does not exist"),
        (["SCRIPT", "--policy", "mixed_fp16"], "mixed_float16"),
        (["SCRIPT", "--policy", "float32", "--policy", "float32"], "needs different policies"),
        (["SCRIPT", "--seeds", "0"], "needs --seeds >= 1, got 0"),
        (["SCRIPT", "--seeds", "many"], "--seeds"),
        (["SCRIPT", "--json", "no/such/folder.json"], "--json needs a file in a folder"),
        (["SCRIPT", "--epochs", "3"], "The script's own options go after --"),
        ([], "SCRIPT"),
    ],
)
def test_wrong_usage(training, capsys, arguments, text):
    given = [training if word == "SCRIPT" else word for word in arguments]
    assert main(["compare", *given]) == 2
    out, err = capsys.readouterr()
    assert text in err
    assert err.startswith("halfstep: ")
    assert out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_on_a_terminal(tmp_path, number):
    script = write(tmp_path / "train.py", TRAINING + "\nif low:" + WAITING)
    policies = ["--policy", "float32", "--policy", "mixed_float16"]
    options = ["--verbose", "--json", str(tmp_path / "out.json"), *policies]
    code, shown = interrupted(["compare", script, *options], number)
    assert code == 130
    assert "interrupted" in shown
    assert "last loss" in shown  # of the run that was done
    assert len(json.loads((tmp_path / "out.json").read_text())["runs"]) == 1
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
