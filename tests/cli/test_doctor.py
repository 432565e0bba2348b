"""The whole way: what is said of a script, and what is written."""

import json
import os
import signal
import sys

import pytest

from halfstep.cli import main
from halfstep.core import Report
from tests.cli.interrupting import WAITING, interrupted
from tests.launch.scripts import TRAINING, write

MODEL = """
import sys
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.ff, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, inputs):
        hidden = self.ff(self.enter(inputs) * FACTOR)
        return self.leave(hidden / (1.0 + hidden.abs()))


torch.manual_seed(0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    inputs = torch.randn(32, 8)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs) * SMALL, inputs[:, :2].argmax(1)).backward()
    optimizer.step()
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def script(factor=1.0, small=1.0):
    text = MODEL.replace("FACTOR", str(factor)).replace("SMALL", str(small))
    with open("train.py", "w") as file:
        file.write(text)
    return "train.py"


@pytest.fixture
def with_torch(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))


def doctor(*arguments):
    return main(["doctor", *arguments])


@pytest.mark.usefixtures("no_framework")
def test_the_text_and_the_hint(tmp_path, capsys):
    write(tmp_path / "train.py", TRAINING)
    assert doctor("train.py") == 0
    out, err = capsys.readouterr()
    assert "train.py: 20 steps, 1 skipped; loss 2" in out
    assert "note: 1 of 20 steps was skipped: gradients held inf." in out
    assert "mixed_float16 (doctor's choice: the script asks for none)" in out
    assert "train.py: done in" in err
    assert "--html doctor.html writes all of it as a page" in err
    assert sorted(os.listdir(tmp_path)) == ["hidden", "train.py"]


@pytest.mark.usefixtures("no_framework")
def test_the_files(tmp_path, capsys):
    training = write(tmp_path / "train.py", TRAINING)
    assert doctor(training, "--json", "a.json", "--html", "a.html", "--steps", "5") == 0
    err = capsys.readouterr().err
    assert "halfstep: wrote a.json\nhalfstep: wrote a.html\n" in err
    assert "--html doctor.html" not in err
    report = Report.from_dict(json.loads((tmp_path / "a.json").read_text()))
    assert len(report.steps) == 5
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "5 steps, 1 skipped" in page


@pytest.mark.usefixtures("no_framework")
def test_json_on_standard_output_is_all_that_is_there(tmp_path, capsys):
    assert doctor(write(tmp_path / "train.py", TRAINING), "--json", "-") == 0
    out, err = capsys.readouterr()
    policy = Report.from_dict(json.loads(out)).policy
    assert policy == "mixed_float16 (doctor's choice: the script asks for none)"
    assert "train.py: 20 steps" in err


@pytest.mark.usefixtures("no_framework")
def test_what_a_script_prints_is_shown_if_asked_for(tmp_path, capsys):
    training = write(tmp_path / "train.py", TRAINING + "print('hello')\n")
    doctor(training)
    assert "hello" not in capsys.readouterr().err
    doctor(training, "--verbose")
    assert "hello" in capsys.readouterr().err


@pytest.mark.usefixtures("no_framework")
def test_a_script_that_fails(tmp_path, capsys):
    assert doctor(write(tmp_path / "train.py", TRAINING + "1 / 0\n")) == 1
    out, err = capsys.readouterr()
    assert "the script failed:" in out
    assert "ZeroDivisionError: division by zero" in out
    assert "train.py: failed after" in err


@pytest.mark.usefixtures("no_framework")
def test_a_script_that_trains_nothing(tmp_path, capsys):
    assert doctor(write(tmp_path / "train.py", "print('x')\n")) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "error: Nothing was trained: neither PyTorch nor Keras was imported. Looked for" in out
    assert "Check that it trains under plain python with the same arguments" in out


@pytest.mark.usefixtures("no_framework")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_it_gets_what_was_seen_so_far(tmp_path, number):
    training = write(tmp_path / "train.py", f"{TRAINING}\nif True:{WAITING}")
    options = ["--verbose", "--json", "a.json", "--html", "a.html"]
    code, shown = interrupted(["doctor", training, *options], number)
    assert code == 130
    assert "halfstep: interrupted" in shown
    assert "20 steps, 1 skipped" in shown
    assert "stopped before its end" in shown
    report = Report.from_dict(json.loads((tmp_path / "a.json").read_text()))
    assert (report.stopped, len(report.steps), report.error) == (True, 20, "")
    assert report.device
    assert "Stopped before its end" in (tmp_path / "a.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("no_framework")
def test_what_was_stopped_before_its_first_step_is_not_called_untrained(tmp_path):
    script = write(tmp_path / "train.py", f"if True:{WAITING}")
    _, shown = interrupted(["doctor", script, "--verbose"], signal.SIGINT)
    assert "0 steps, none skipped; stopped before its end" in shown
    assert "Nothing was trained" not in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["none.py"], "doctor needs the path of a Python script, got 'none.py'"),
        (["."], "doctor needs a Python file, got '.', which is not a file"),
        (["train.py", "--every", "0"], "doctor needs --every >= 1, got 0"),
        (["train.py", "--steps", "0"], "doctor needs --steps >= 1, got 0. Write --steps 200, or"),
        (["train.py", "--policy", "float17"], "'float17'"),
        (["train.py", "--policy", ""], "got ''"),
        (["train.py", "--html", ""], "--html needs a file in a folder that exists"),
        (["train.py", "--html", "."], "'.': this is a folder. Name a file in it."),
        (["train.py", "--json", "-", "--html", "-"], "--html needs an output of its own, got '-'"),
        (["train.py", "--html", "none/a.html"], "--html needs a file in a folder that exists"),
        (["train.py", "--json", "none/a.json"], "--json needs a file in a folder that exists"),
        (["train.py", "--lr", "1"], "go after --: halfstep doctor SCRIPT -- ..."),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, text):
    write(tmp_path / "train.py", "open('ran', 'w')")
    assert doctor(*arguments) == 2
    assert text in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_missing_extra_is_told_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("halfstep.report._page.find_spec", lambda name: None)
    assert doctor(write(tmp_path / "train.py", TRAINING), "--html", "a.html") == 2
    assert "Install them: python -m pip install 'halfstep[report]'." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("with_torch")
def test_a_healthy_training(capsys):
    assert doctor(script(), "--json", "a.json", "--every", "5", "--", "12") == 0
    out = capsys.readouterr().out
    assert "no findings" in out
    assert "first fault" not in out
    with open("a.json") as file:
        report = Report.from_dict(json.load(file))
    assert report.sampled == (1, 5, 10)
    assert report.ranges.modules == ("enter", "ff", "leave")
    assert {cast.module for cast in report.casts} == {"enter", "ff", "leave"}


@pytest.mark.slow
@pytest.mark.usefixtures("with_torch")
def test_what_the_model_itself_casts_is_told_under_its_class(capsys):
    text = MODEL.replace("self.leave(hidden", "self.leave.weight.sum() + self.leave(hidden")
    text = text.replace("self.leave(hidden", "hidden @ self.leave.weight.T + self.leave(hidden")
    with open("train.py", "w") as file:
        file.write(text.replace("FACTOR", "1.0").replace("SMALL", "1.0"))
    doctor("train.py", "--json", "a.json", "--", "2")
    assert "(the model)" not in capsys.readouterr().out
    with open("a.json") as file:
        casts = Report.from_dict(json.load(file)).casts
    assert "Net" in {cast.module for cast in casts}


@pytest.mark.slow
@pytest.mark.usefixtures("with_torch")
def test_an_overflow_that_a_later_operation_hides(capsys):
    assert doctor(script(factor=3e5), "--steps", "6", "--", "100") == 1
    out = capsys.readouterr().out
    assert "error: Net: Multiply made inf in the forward pass, in float16" in out
    assert "train.py, line" not in out
    assert "train.py:" in out
    assert out.count("write:") == 1
    table = out.partition("or are not finite")[2]
    assert [line.split()[:2] for line in table.splitlines()[3:4]] == [["Net", "output"]]


@pytest.mark.slow
@pytest.mark.usefixtures("with_torch")
def test_a_fault_outside_of_the_model_is_told_with_its_line(capsys):
    text = MODEL.replace("FACTOR", "1.0").replace("model(inputs) * SMALL", "model(inputs) / 0.0")
    with open("train.py", "w") as file:
        file.write(text)
    assert doctor("train.py", "--steps", "3", "--", "100") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "was made outside of every model, before" in out
    assert f"train.py:{text[: text.index('cross_entropy')].count(chr(10)) + 1}:" in out


@pytest.mark.slow
@pytest.mark.usefixtures("with_torch")
def test_with_its_remedy_the_script_trains(capsys):
    path = script(factor=3e5)
    assert doctor(path, "--steps", "3", "--json", "a.json", "--", "100") == 1
    with open("a.json") as file:
        remedy = Report.from_dict(json.load(file)).findings[0].remedy
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("torch.manual_seed(0)", remedy))
    assert doctor(path, "--steps", "12", "--", "100") == 0
    assert "12 steps, none skipped" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("with_torch")
def test_gradients_that_vanish_without_a_scale(capsys):
    policy = "compute_dtype=float16, scale=none"
    assert doctor(script(small=1e-6), "--policy", policy, "--", "3") == 1
    out = capsys.readouterr().out
    assert "of the gradients become 0 in float16 at the scale in force, 2^0." in out
    assert doctor(script(small=1e-6), "--", "3") == 0


@pytest.mark.slow
@pytest.mark.usefixtures("with_torch")
@pytest.mark.parametrize(
    ("arguments", "policy", "code"),
    [
        ((), "mixed_bfloat16 by prepare in train.py:21 (the script's own)", 0),
        (("--policy", "mixed_float16"), "mixed_float16 (--policy)", 1),
    ],
)
def test_policies_of_the_script_count_unless_another_is_asked_for(arguments, policy, code):
    name = script(factor=1e5)
    with open(name) as file:
        text = file.read()
    prepared = 'import halfstep.torch\nhalfstep.torch.prepare(model, optimizer, "mixed_bfloat16")\n'
    with open(name, "w") as file:
        file.write(text.replace("for step", f"{prepared}for step"))
    assert doctor(name, "--json", "out.json", *arguments, "--", "12") == code
    with open("out.json") as file:
        assert Report.from_dict(json.load(file)).policy == policy


@pytest.mark.usefixtures("no_framework")
def test_a_script_is_never_replaced_by_what_is_found_in_it(tmp_path, capsys):
    write(tmp_path / "train.py", TRAINING)
    before = (tmp_path / "train.py").read_text()
    assert doctor("train.py", "--json", "train.py") == 2
    assert "which would replace 'train.py'" in capsys.readouterr().err
    assert (tmp_path / "train.py").read_text() == before
