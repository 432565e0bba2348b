"""Keras scripts that know nothing of halfstep, on each backend: what is measured, and who wins."""

import json
import re
from importlib.util import find_spec

import pytest

from halfstep.cli import main
from halfstep.launch import RunResult
from tests.cli.test_run import PLAIN, finished, result, run
from tests.launch.scripts import write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("keras") is None, reason="Keras is not installed"),
]

BACKENDS = [
    pytest.param(
        name, marks=pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    )
    for name in ("jax", "tensorflow", "torch")
]

MODEL = """
import sys
import numpy as np
import keras
keras.utils.set_random_seed(0)
inputs = np.random.RandomState(0).rand(64, 16).astype("float32")
targets = inputs.mean(1, keepdims=True)
def build(**options):
    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu", **options)]
    return keras.Sequential([*layers, keras.layers.Dense(1, **options)])
"""
FIT = """
model = build()
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(inputs, targets, batch_size=32, epochs=3, verbose=0, validation_data=(inputs, targets))
"""
OWN_POLICY = """
keras.utils.clear_session()
keras.mixed_precision.set_global_policy("OWN")
"""
SAVE = """
np.savez(sys.argv[1], *model.get_weights())
print("saved")
"""


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", request.param)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    return request.param


def test_fit_trains_by_the_policy_of_the_command(tmp_path, backend):
    text = MODEL + OWN_POLICY.replace("OWN", "float32") + FIT
    trained = result(tmp_path, text, "--policy", "mixed_float16")
    assert (trained.steps, trained.optimizer_steps, len(trained.losses)) == (6, 6, 6)
    assert (trained.regions, trained.scalers, len(trained.step_seconds)) == (1, 1, 5)
    assert trained.losses[-1] < trained.losses[0]
    assert trained.scale == 2.0 ** (15 - len(trained.skipped))
    assert (trained.region_policies, trained.lowered) == (("mixed_float16",), True)
    assert trained.last_metrics["val_loss"] > 0
    assert {"keras", backend} <= dict(trained.versions).keys()
    assert (trained.saved_bytes is not None) == (backend == "torch")


BATCHES = """
model = build()
model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
for _ in range(4):
    model.reset_metrics()
    print(float(model.train_on_batch(inputs, targets)))
model.reset_metrics()
model.fit(inputs, targets, batch_size=32, epochs=1, shuffle=False, verbose=0)
print(float(model.history.history["loss"][0]))
"""


def test_the_losses_are_those_of_the_batches(tmp_path, backend):
    done = run(tmp_path, MODEL + BATCHES, "--policy", "float32", "--json", "out.json")
    *batches, epoch = map(float, done.stdout.split())
    losses = RunResult.from_dict(json.loads((tmp_path / "out.json").read_text())["run"]).losses
    assert losses[:4] == pytest.approx(batches, rel=1e-5)
    assert sum(losses[4:]) / 2 == pytest.approx(epoch, rel=1e-5)


def test_without_a_policy_the_one_of_the_script_counts(tmp_path, backend):
    script = MODEL + OWN_POLICY.replace("OWN", "mixed_float16") + FIT
    assert "  mixed_float16 (the script's own)\n" in run(tmp_path, script).stderr
    chosen = run(tmp_path, MODEL + "keras.utils.clear_session()" + FIT).stderr
    assert re.search(r"policy +auto: \w+ \(chosen for this device; --policy sets it\)", chosen)


def test_a_policy_that_no_layer_follows_is_not_claimed(tmp_path, backend):
    text = MODEL + FIT.replace("build()", "build(dtype='float32')")
    done = run(tmp_path, text, "--policy", "mixed_bfloat16")
    assert "  float32 (mixed_bfloat16 did not take effect)\n" in done.stderr
    assert "each has a dtype of its own" in done.stderr


def test_compare(tmp_path, backend, capsys):
    script, target = write(tmp_path / "train.py", MODEL + FIT), tmp_path / "out.json"
    policies = ["--policy", "float32", "--policy", "mixed_float16"]
    assert main(["compare", script, *policies, "--json", str(target)]) == 0
    full, low = map(RunResult.from_dict, json.loads(target.read_text())["runs"])
    assert full.losses[0] != low.losses[0] == pytest.approx(full.losses[0], rel=0.02)
    assert full.scale == 1.0 < low.scale <= 2.0**15
    assert "val_loss" in capsys.readouterr().out


OVERFLOW = """
model = build()
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**126)
model.compile(optimizer, "mse")
model.fit(inputs * 1e9, targets, batch_size=32, epochs=1, verbose=0)
"""


def test_skipped_steps(tmp_path, backend):
    trained = result(tmp_path, MODEL + OVERFLOW, "--policy", "float32")
    assert (trained.steps, trained.optimizer_steps) == (2, 2)
    assert [skip.step for skip in trained.skipped] == [1, 2]
    assert trained.scale < 2.0**126


LOOPS = {
    "torch": """
import torch
for _ in range(6):
    model.zero_grad()
    loss = loss_of(torch.tensor(targets), model(torch.tensor(inputs)))
    optimizer.scale_loss(loss).backward()
    with torch.no_grad():
        optimizer.apply([each.value.grad for each in model.trainable_variables])
""",
    "tensorflow": """
import tensorflow as tf
def step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = loss_of(targets, model(inputs))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
step = COMPILE(step)
for _ in range(6):
    step(inputs, targets)
""",
    "jax": """
import jax
def scaled(trained, others, inputs, targets):
    outputs, others = model.stateless_call(trained, others, inputs)
    return optimizer.scale_loss(loss_of(targets, outputs)), others
def step(trained, others, state):
    grads, others = jax.grad(scaled, has_aux=True)(trained, others, inputs, targets)
    return *optimizer.stateless_apply(state, grads, trained), others
step = COMPILE(step)
values = lambda variables: [each.value for each in variables]
trained, state = values(model.trainable_variables), values(optimizer.variables)
others = values(model.non_trainable_variables)
for _ in range(6):
    trained, state, others = step(trained, others, state)
""",
}
COMPILERS = {"torch": ["no"], "tensorflow": ["no", "tf.function", "xla"], "jax": ["no", "jax.jit"]}
COMPILE = {"no": "(lambda it: it)", "xla": "tf.function(jit_compile=True)"}


def compiler(name):
    return COMPILE.get(name, name)


LOOP = """
model, loss_of = build(), keras.losses.MeanSquaredError()
optimizer = keras.optimizers.SGD(0.05)
optimizer.build(model.trainable_variables)
"""


@pytest.mark.parametrize("compiled", [False, True])
def test_loops_of_the_script_itself(tmp_path, backend, compiled):
    policy = "mixed_bfloat16" if compiled else "mixed_float16"
    for name in COMPILERS[backend][compiled:]:
        loop = LOOPS[backend].replace("COMPILE", compiler(name))
        trained = result(tmp_path, MODEL + LOOP + loop, "--policy", policy)
        assert trained.unscaled == (policy == "mixed_float16")
        assert (trained.steps, trained.optimizer_steps, trained.scalers) == (6, 6, 1)
        assert len(trained.losses) == 6
        assert trained.losses[-1] < trained.losses[0]


ASSIGN = """
for variable, value in zip(model.trainable_variables, trained):
    variable.assign(value)
"""
KEEP = "kept = model.get_weights()\n"
SAVE_BOTH = SAVE.replace("*model", "*kept, *model")


def test_float32_is_plain_python(tmp_path, backend):
    numpy = pytest.importorskip("numpy")
    loop = LOOPS[backend].replace("COMPILE", compiler(COMPILERS[backend][-1]))
    assign = ASSIGN if backend == "jax" else ""
    text = MODEL + FIT + KEEP + LOOP + loop + assign + SAVE_BOTH
    done = run(tmp_path, text, "--policy", "float32", args=["ours.npz"])
    plain = finished([*PLAIN, "train.py", "plain.npz"], tmp_path)
    assert done.stdout == plain.stdout == "saved\n"
    ours, theirs = (numpy.load(tmp_path / f"{name}.npz") for name in ("ours", "plain"))
    assert len(ours.files) == 8
    assert all(numpy.array_equal(ours[name], theirs[name]) for name in ours.files)


def test_a_layer_of_keras_is_no_region_of_torch(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    own = "import torch; torch.nn.Linear(4, 2)(torch.ones(1, 4))\n"
    trained = result(tmp_path, MODEL + own + FIT, "--policy", "mixed_bfloat16")
    assert trained.regions == 2  # one of each


@pytest.mark.parametrize("backend", BACKENDS[:1], indirect=True)
def test_a_policy_that_keras_cannot_follow(tmp_path, backend):
    done = run(tmp_path, MODEL, "--policy", "compute_dtype=float16,rules=torch-2.13")
    assert done.returncode == 2
    assert "halfstep: Keras takes the dtype of a layer, not of an operation" in done.stderr
    assert "Traceback" not in done.stderr
