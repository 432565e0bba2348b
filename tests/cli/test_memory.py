"""The whole way: what the table says of a model and of a script."""

import json

import pytest

from halfstep.cli import main
from halfstep.report import UNKNOWN
from tests.launch.scripts import write

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.BatchNorm1d(128), nn.Linear(128, 4))
    return model, torch.rand(16, 64)

def alone():
    return build()[0]

def three():
    return 3

def broken():
    raise ZeroDivisionError("a fault of its own")

def strict():
    return build()[0], "no tensor"
"""
SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))
optimizer = torch.optim.RMSprop(model.parameters())
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    loss = model(torch.rand(16, 64)).square().mean()
    loss.backward()
    optimizer.step()
    if step == 20:
        raise RuntimeError("was not stopped")
"""
COUNT = 64 * 128 + 128 + 128 * 4 + 4
NORM = 2 * 128


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    write(tmp_path / "model.py", MODEL)
    write(tmp_path / "train.py", SCRIPT)


def measured(*arguments):
    """Returns the JSON file, with layouts and activations by name."""
    assert main(["memory", *arguments[:1], "--json", "out.json", *arguments[1:]]) == 0
    with open("out.json", encoding="utf-8") as file:
        data = json.load(file)
    data["layouts"] = {each["name"]: each for each in data["layouts"]}
    data["activations"] = {each["policy"]: each for each in data["activations"]}
    return data


@pytest.mark.slow
def test_a_model(capsys):
    data = measured("model.py:build")
    assert (data["format"], data["parameters"], data["batch"]) == (
        "halfstep-memory-1",
        COUNT + NORM,
        16,
    )
    layouts = data["layouts"]
    shown = {name: each for name, each in layouts.items() if each["measured"]}
    assert {"float32", "cast masters", "split masters", "split +release"} <= shown.keys()
    for layout in shown.values():
        expected = layout["predicted"]
        assert {part: layout["measured"][part] for part in expected} == expected
    # The parameters of the batch norm stay in float32.
    totals = {"float32": 16 * data["parameters"], "split masters": 14 * COUNT + 16 * NORM}
    for name, total in totals.items():
        assert sum(layouts[name]["predicted"].values()) == total + 6 * 4
    activations = data["activations"]
    low, full = (activations[name]["per_sample"] for name in ("mixed_bfloat16", "float32"))
    assert 0.5 <= low / full < 0.8
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("model.py:build: 0.00909 M parameters, AdamW, 16 samples")
    for piece in ("16 / 16", "split +8-bit +release", "bytes per parameter", "per activation"):
        assert piece in out


@pytest.mark.slow
def test_a_model_without_inputs(capsys):
    data = measured("model.py:alone", "--optimizer", "SGD, momentum=0.9")
    assert data["activations"] == {}
    assert data["layouts"]["float32"]["measured"]["state"] == 4 * data["parameters"]
    assert "torchao.optim has no SGD with 8-bit states" in capsys.readouterr().out


@pytest.mark.slow
def test_a_script_is_stopped_after_three_steps(capsys):
    data = measured("train.py", "--", "1000000")
    assert (data["parameters"], data["steps"], data["args"]) == (COUNT, 3, ["1000000"])
    for name in ("float32", "cast masters"):
        layout = data["layouts"][name]
        assert layout["measured"]["weights"] == layout["measured"]["gradients"] == 4 * COUNT
        assert layout["measured"]["state"] == layout["predicted"]["state"] == 4 * COUNT + 4 * 4
    assert data["layouts"]["split masters"]["predicted"]["remainder"] == 2 * COUNT
    assert data["layouts"]["split masters"]["measured"] is None
    assert data["activations"]["mixed_bfloat16"]["bytes"] > 0
    out, err = capsys.readouterr()
    assert "a script is run as it is, and would have to ask for this" in out
    assert "mixed_float16: done in" in err


@pytest.mark.slow
def test_a_script_that_ends_sooner(capsys):
    assert measured("train.py", "--", "1")["steps"] == 1
    out = capsys.readouterr().out
    assert "measured after 1 step\n" in out
    assert "activations not measured: they are counted in the second step, and" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "args", "text"),
    [
        ("train.py", ["--", "0"], "no optimizer took a step: neither a call of backward() nor an"),
        ("train.py", [], "IndexError: list index out of range"),
        ("model.py:broken", [], "ZeroDivisionError: a fault of its own"),
        ("no_such_module", ["-m"], "-m needs the name of a Python module, got 'no_such_module'"),
        ("torch.nn:Linear", [], "TypeError: Linear.__init__() missing 2 required positional"),
    ],
)
def test_what_fails(target, args, text, capsys):
    assert main(["memory", target, *args]) == 1
    out = capsys.readouterr().out
    assert f"halfstep: {target} was not measured:" in out
    assert text in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["model.py:three"], "memory needs a callable that returns a torch.nn.Module, or one and"),
        (["model.py:nope"], "memory needs a callable that is there, got 'nope', which model.py"),
        (["nowhere.at.all:build"], "memory needs a module that can be imported, got 'nowhere.at"),
        (["model.py:build", "--optimizer", "Adm"], "--optimizer needs the name of an optimizer of"),
        (["model.py:build", "--optimizer", "LBFGS"], "--optimizer needs one whose step can do"),
    ],
)
def test_wrong_usage_that_the_process_finds(arguments, text, capsys):
    assert main(["memory", *arguments]) == 2
    assert f"halfstep: {text}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_that_cannot_be_called_shows_why(capsys):
    assert main(["memory", "model.py:strict"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "float32, cast masters" in out
    assert "not measured: TypeError: linear(): argument 'input' (position 1) must be Tensor" in out
    assert f"16 / {UNKNOWN} " in out
