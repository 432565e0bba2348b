import subprocess
import sys

import pytest
import typer

import halfstep
from halfstep.cli import main
from halfstep.cli._app import app

FLAGS = {
    "": ["--help", "--version"],
    "compare": [
        "--",
        "--help",
        "--json",
        "--policy",
        "--seed",
        "--seeds",
        "--verbose",
        "-m",
        "SCRIPT",
    ],
    "doctor": [
        "--",
        "--every",
        "--help",
        "--html",
        "--json",
        "--policy",
        "--steps",
        "--verbose",
        "-m",
        "SCRIPT",
    ],
    "memory": ["--", "--help", "--json", "--optimizer", "-m", "TARGET"],
    "plan": [
        "--",
        "--budget",
        "--help",
        "--json",
        "--output",
        "--seconds",
        "--step",
        "--verbose",
        "-m",
        "-o",
        "SCRIPT",
    ],
    "rules": ["--help", "--json", "NAME"],
    "run": ["--", "--help", "--json", "--policy", "-m", "SCRIPT"],
}


def flags(command, context):
    names = {word for parameter in command.get_params(context) for word in parameter.opts}
    renamed = {"script": "SCRIPT", "target": "TARGET", "args": "--", "name": "NAME"}
    return sorted(renamed.get(name, name) for name in names)


def test_the_flags_are_the_frozen_list():
    root = typer.main.get_command(app)
    context = typer.Context(root)
    found = {"": flags(root, context)}
    found |= {name: flags(each, typer.Context(each)) for name, each in root.commands.items()}
    assert found == {name: sorted(words) for name, words in FLAGS.items()}


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"halfstep {halfstep.__version__}\n"


@pytest.mark.parametrize("command", [[], ["compare"], ["memory"], ["plan"], ["rules"], ["run"]])
def test_help(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: halfstep")
    assert max(map(len, out.splitlines())) <= 80


def test_without_a_command_the_help_is_shown(capsys):
    assert main([]) == 0
    assert "Usage: halfstep" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["trian"], "No such command 'trian'"),
        (["--nope"], "halfstep: No such option: --nope\n"),
        (["run", "--nope"], "The script's own options go after the script: halfstep run SCRIPT"),
        (["run"], "SCRIPT"),
        (["memory"], "TARGET"),
        (["memory", "a.py", "--nope"], "go after --: halfstep memory SCRIPT -- ..."),
        (["memory", "missing.py"], "memory needs the path of a Python script, got 'missing.py',"),
        (["run", "missing.py"], "run needs the path of a Python script, got 'missing.py', which"),
        (["run", "--policy", "mixed_fp16", __file__], "mixed_float16"),
        (
            ["run", "--policy", "compute_dtype=float64", __file__],
            "run needs a policy with compute_dtype float32, bfloat16, float16, got",
        ),
        (["run", "--json", "no/such/folder.json", __file__], "--json needs a file in a folder"),
        (["rules", "--nope"], "halfstep: No such option: --nope\n"),
    ],
)
def test_wrong_usage(arguments, text, capsys):
    assert main(arguments) == 2
    assert text in capsys.readouterr().err


NEEDS = {
    "memory": "needs PyTorch, got an environment without it. "
    "Install it: python -m pip install 'halfstep[torch]'.",
    "run": "needs PyTorch or Keras, got an environment without them. "
    "Install one: python -m pip install 'halfstep[torch]', or 'halfstep[keras]'.",
}


@pytest.mark.parametrize("command", NEEDS)
def test_what_needs_a_framework(command, monkeypatch, capsys):
    monkeypatch.setattr(f"halfstep.cli._{command}.find_spec", lambda name: None)
    assert main([command, __file__]) == 2
    assert f"halfstep: {command} {NEEDS[command]}" in capsys.readouterr().err


def test_as_a_module():
    command = [sys.executable, "-m", "halfstep", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"halfstep {halfstep.__version__}\n"


def test_importing_loads_no_framework():
    code = "import sys, halfstep.cli; print('torch' in sys.modules or 'jax' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
