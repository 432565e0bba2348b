"""`halfstep run` on scripts that PyTorch's users write: what it says at the end, and where."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from halfstep.launch import RunResult
from tests.launch.scripts import hide_frameworks, write

PLAIN = [sys.executable]
OURS = [sys.executable, "-m", "halfstep", "run"]

MODEL = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs = torch.rand(64, 16)
targets = inputs.sum(1, keepdim=True)
"""
LOOP = """
for _ in range(6):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
"""
SAVE = """
torch.save(model.state_dict(), sys.argv[1])
print("saved", sys.argv[1:])
"""


def importing_halfstep():
    """Returns the variables with which a process finds halfstep and writes long lines."""
    paths = [os.environ.get("PYTHONPATH", ""), str(Path(__file__).parents[2] / "src")]
    return {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "500"}


def finished(command, folder):
    environment = os.environ | importing_halfstep()
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)


def run(folder, text, *options, args=()):
    write(folder / "train.py", text)
    return finished([*OURS, *options, "train.py", *args], folder)


def result(folder, text, *options):
    """Returns the result of a script that was run, from the JSON file."""
    done = run(folder, text, *options, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    return RunResult.from_dict(json.loads((folder / "out.json").read_text())["run"])


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.slow
def test_float32_is_plain_python(tmp_path, torch):
    done = run(tmp_path, MODEL + LOOP + SAVE, "--policy", "float32", args=["ours.pt", "--policy"])
    plain = finished([*PLAIN, "train.py", "plain.pt", "--policy"], tmp_path)
    assert done.stdout.replace("ours", "plain") == plain.stdout
    pairs = zip(
        torch.load(tmp_path / "ours.pt").values(),
        torch.load(tmp_path / "plain.pt").values(),
        strict=True,
    )
    assert all(ours.equal(theirs) for ours, theirs in pairs)


@pytest.mark.slow
def test_the_summary_and_the_file(tmp_path, torch):
    script = MODEL + LOOP + "import os; os.chdir('/'); sys.exit(3)"
    done = run(tmp_path, script, "--policy", "mixed_bfloat16", "--json", "out.json", args=["--x"])
    assert (done.returncode, done.stdout) == (3, "")
    lines = dict(line.split(maxsplit=1) for line in done.stderr.splitlines())
    assert lines["halfstep:"] == "train.py"
    assert lines["policy"] == "mixed_bfloat16"
    assert (lines["steps"], lines["skipped"]) == ("6", "0 of 6")
    assert " to " in lines["loss"]
    assert lines["peak"].endswith("(growth of the process)")
    assert "in one step" in lines["saved"]
    assert lines["last"].split() == ["scale", "1"]
    assert f"torch {torch.__version__}" in done.stderr
    data = json.loads((tmp_path / "out.json").read_text())
    assert (data["format"], data["script"], data["module"]) == ("halfstep-run-1", "train.py", False)
    assert data["args"] == ["--x"]
    trained = RunResult.from_dict(data["run"])
    assert (trained.steps, trained.backwards, len(trained.losses)) == (6, 6, 6)
    assert (trained.exit_code, trained.seed, trained.policy) == (3, None, "mixed_bfloat16")


@pytest.mark.slow
def test_an_error_of_the_script_comes_before_the_summary(tmp_path, torch):
    done = run(tmp_path, MODEL + LOOP + "raise ValueError('at the end')", "--policy", "float32")
    assert done.returncode == 1
    trace, _, summary = done.stderr.partition("halfstep: train.py\n")
    assert trace.splitlines()[-1] == "ValueError: at the end"
    assert "  policy              float32\n" in summary


@pytest.mark.slow
def test_what_the_script_sets_before_its_imports_counts(tmp_path, torch):
    text = """
        import os, sys
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        os.environ["OMP_NUM_THREADS"] = "1"
        import torch
        print(torch.get_num_threads())
    """
    assert run(tmp_path, text).stdout == "1\n"


AMP = """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
for _ in range(6):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
    factor = torch.inf if _ == 2 else 1.0
    scaler.scale(loss * factor).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_script_for_torch_amp_is_counted_once(tmp_path, torch, policy):
    trained = result(tmp_path, MODEL + AMP, "--policy", policy)
    assert (trained.steps, trained.optimizer_steps, trained.scalers) == (6, 6, 1)
    assert len(trained.losses) == 6
    assert trained.losses[0] < 2.0**20
    assert [(skip.step, "torch.amp.GradScaler" in skip.reason) for skip in trained.skipped] == [
        (3, True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_script_for_halfstep_is_counted_once(tmp_path, torch, policy):
    text = AMP.replace("torch.amp.", "").replace("torch.autocast", "autocast")
    text = "from halfstep.torch import GradScaler, autocast\n" + MODEL + text
    trained = result(tmp_path, text, "--policy", policy)
    assert (trained.steps, trained.optimizer_steps, trained.scalers) == (6, 6, 1)
    # Neither policy scales, so the scaler neither looks nor skips.
    assert (len(trained.losses), trained.skipped) == (6, ())


@pytest.mark.slow
def test_a_policy_wins_over_what_a_script_passes_to_halfstep(tmp_path, torch):
    text = """
        import torch
        from halfstep.torch import autocast
        with autocast("cpu", dtype=torch.float16):
            print(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)
    """
    assert run(tmp_path, text).stdout == "torch.float16\n"
    assert run(tmp_path, text, "--policy", "mixed_bfloat16").stdout == "torch.bfloat16\n"


@pytest.mark.slow
def test_the_last_scale_of_torch_amp_is_the_one_after_the_last_step(tmp_path, torch):
    text = MODEL + AMP.replace("init_scale=2.0**40", "init_scale=4.0, growth_interval=1")
    trained = result(tmp_path, text, "--policy", "float32")
    assert trained.scale == 4.0 * 2**4  # five steps to grow at, and one to back off
    assert trained.torch_amp


FUNCTIONS = """
weights = [torch.rand(16, 8, requires_grad=True), torch.rand(8, 1, requires_grad=True)]
optimizer = torch.optim.SGD(weights, lr=1e-3)
model = lambda inputs: (inputs @ weights[0]).relu() @ weights[1]
"""
COMPILED = """
@torch.compile(backend="eager")
def loss_of(inputs, targets):
    return nn.functional.mse_loss(model(inputs), targets)
"""
WITHOUT_EFFECT = {
    "functions": MODEL + FUNCTIONS + LOOP,
    "compiled": MODEL
    + COMPILED
    + LOOP.replace("nn.functional.mse_loss(model(inputs), t", "loss_of(inputs, t"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_policy_under_which_nothing_ran_is_not_claimed(tmp_path, torch, name):
    done = run(tmp_path, WITHOUT_EFFECT[name], "--policy", "mixed_bfloat16", "--json", "out.json")
    assert "  float32 (mixed_bfloat16 did not take effect)\n" in done.stderr
    assert "because no model became a region: everything ran in the script's own " in done.stderr
    trained = RunResult.from_dict(json.loads((tmp_path / "out.json").read_text())["run"])
    assert (trained.steps, trained.regions, trained.lowered) == (6, 0, False)
    assert trained.ineffective


@pytest.mark.slow
@pytest.mark.parametrize("line", ["", "with autocast('cpu', dtype=torch.bfloat16):"])
def test_a_policy_under_which_something_ran_is_claimed(tmp_path, torch, line):
    functions = FUNCTIONS if line else ""
    forward = "loss = nn.functional.mse_loss(model(inputs), targets)"
    loop = LOOP.replace(forward, f"{line} {forward}".strip())
    text = f"from halfstep.torch import autocast\n{MODEL}{functions}{loop}"
    trained = result(tmp_path, text, "--policy", "mixed_bfloat16")
    assert trained.lowered
    assert not trained.ineffective


@pytest.mark.slow
def test_policies_of_the_script_itself(tmp_path, torch):
    prepare = (
        "from halfstep.torch import prepare; prepare(model, optimizer, policy='mixed_float16')"
    )
    own = run(tmp_path, MODEL + prepare + LOOP).stderr
    assert "  mixed_float16 (the script's own)\n" in own or torch.cuda.is_available()
    text = MODEL + prepare + LOOP
    asked = result(tmp_path, text, "--policy", "mixed_bfloat16")
    assert (asked.regions, asked.region_policies) == (1, ("mixed_bfloat16",))
    island = MODEL + prepare.replace(
        "model, optimizer, policy='mixed_float16'", "model[0], policy='float32'"
    )
    mixed = result(tmp_path, island + LOOP, "--policy", "mixed_bfloat16")
    assert sorted(mixed.region_policies) == ["float32", "mixed_bfloat16"]


IN_BACKWARD = """
optimizers = {each: torch.optim.SGD([each], lr=0.01) for each in model.parameters()}
for each in optimizers:
    each.register_post_accumulate_grad_hook(lambda it: optimizers[it].step())
for _ in range(6):
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
"""
OWN_HOOKS = """
from torch.autograd.graph import saved_tensors_hooks
left = 0
def unpack(tensor):
    global left
    left += 1
    return tensor
for step in range(6):
    optimizer.zero_grad()
    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        nn.functional.mse_loss(model(inputs), targets).backward()
        if step < 3: optimizer.step()
    if step >= 3: optimizer.step()
before = left
nn.functional.mse_loss(model(inputs), targets).backward()
assert before > 0 and left == before, (before, left)
"""


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("text", [IN_BACKWARD, OWN_HOOKS], ids=["backward", "hooks"])
def test_bytes_that_cannot_be_counted_are_not_shown(tmp_path, torch, policy, text):
    done = run(tmp_path, MODEL + text, "--policy", policy)
    assert done.returncode == 0, done.stderr
    assert "steps " in done.stderr
    assert "saved for backward" not in done.stderr


UNTRAINED = {
    "import torch": "neither a call of backward() nor an optimizer step was seen",
    f"{MODEL}with torch.no_grad(): model(inputs)": "neither a call of backward() nor",
    f"{MODEL}torch.amp.GradScaler('cpu').scale(model(inputs).sum())": "losses were scaled, but "
    "neither backward() nor an optimizer step followed.",
}


@pytest.mark.slow
def test_parameters_that_are_changed_by_hand(tmp_path, torch):
    text = f"""{MODEL}
for _ in range(4):
    model.zero_grad()
    model(inputs).square().mean().backward()
    for each in model.parameters():
        each.data.add_(each.grad, alpha=-0.01)
"""
    done = run(tmp_path, text)
    assert done.returncode == 0
    assert "4 (backward passes; no optimizer was seen" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("text", UNTRAINED)
def test_nothing_trained(tmp_path, torch, text):
    done = run(tmp_path, text)
    assert done.returncode == 0
    assert f"halfstep: nothing was trained in train.py: {UNTRAINED[text]}" in done.stderr


def test_without_the_import_of_a_framework(tmp_path, monkeypatch):
    hide_frameworks(monkeypatch, tmp_path / "hidden")
    done = run(tmp_path, "print('x')", "--json", "-")
    assert (
        done.stderr
        == "halfstep: nothing was trained in train.py: neither PyTorch nor Keras was imported.\n"
    )
    assert done.stdout.startswith("x\n{")
    done = run(tmp_path, "1 / 0", "--policy", "float32")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.slow
def test_the_page_shows_what_is_printed(tmp_path, torch):
    page = (Path(__file__).parents[2] / "docs" / "run.md").read_text()
    script, shown = re.search(r"```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL).groups()
    done = run(tmp_path, script)
    printed = (done.stdout + done.stderr).splitlines()
    labels = [re.split(r"  +|: ", line.strip())[0] for line in printed]
    assert labels[:-1] == [re.split(r"  +|: ", line.strip())[0] for line in shown.splitlines()][:-1]
    assert "steps               100" in done.stderr


def test_a_plan_is_found_by_a_script_that_moves(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine.toml").write_text('[policy]\ncompute_dtype = "bfloat16"\nscale = "none"')
    moving = MODEL + 'import os\nos.chdir("elsewhere")\n' + LOOP
    done = result(tmp_path, moving, "--policy", "mine.toml")
    assert done.policy == str(tmp_path / "mine.toml")
    assert done.steps == 6
