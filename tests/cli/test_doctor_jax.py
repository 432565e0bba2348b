"""`halfstep doctor` on scripts of JAX that know nothing of halfstep, and on those that do."""

from importlib.util import find_spec

import pytest

from tests.cli.doctor_scripts import examined, told

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("jax") is None, reason="JAX is not installed"),
]

MODEL = """
import functools
import jax
import jax.numpy as jnp
inputs = jax.random.uniform(jax.random.key(0), (32, 16))
targets = inputs.mean(1, keepdims=True)
params = {"first": jnp.full((16, 8), 0.1), "wide": jnp.full((8, 4), WIDE)}
params["head"] = jnp.ones((4, 1)) / WIDE
def forward(params, values):
    for name in ("first", "wide", "head"):
        with jax.named_scope(name):
            values = values @ params[name].astype(jnp.float16)
    return values.astype(jnp.float32)
def loss_of(params, inputs, targets):
    return jnp.mean((forward(params, inputs.astype(jnp.float16)) - targets) ** 2)
def descended(params, grads):
    return jax.tree.map(lambda param, grad: param - 1e-3 * grad, params, grads)
"""
JITTED = """
@functools.partial(jax.jit, donate_argnums=0)
def step(params, inputs, targets):
    loss, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
    return descended(params, grads), loss
for _ in range(12):
    params, loss = step(params, inputs, targets)
"""
EAGER = """
for _ in range(12):
    loss, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
    params = jax.jit(descended)(params, grads)
"""
METHOD = """
class Trainer:
    @jax.jit(static_argnums=(0, 2))
    def step(self, params, power):
        found, grads = jax.value_and_grad(loss_of)(params, inputs, targets)
        return descended(params, grads), {"loss": found, "power": found**power}
for _ in range(12):
    params, logs = Trainer.step(None, params, 2)
"""
LOOPS = {"jitted": JITTED, "eager": EAGER, "method": METHOD}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_product_that_overflows(tmp_path, loop):
    done, report = examined(tmp_path, MODEL.replace("WIDE", "1e5 / 2") + LOOPS[loop])
    assert done.returncode == 1
    fault = report.diagnosis.first
    assert (fault.module, fault.operation, fault.phase) == ("wide", "dot_general", "forward")
    assert fault.source.endswith("(forward)")
    assert "jnp.bfloat16" in report.findings[0].remedy
    assert report.findings[0].text.endswith("(step 1).")


@pytest.mark.parametrize("loop", LOOPS)
def test_a_healthy_training(tmp_path, loop):
    done, report = examined(tmp_path, MODEL.replace("WIDE", "2.0") + LOOPS[loop])
    assert (done.returncode, len(report.steps), report.skipped) == (0, 12, ())
    assert report.steps[-1].loss < report.steps[0].loss
    assert not report.diagnosis
    notes = told(report, "note")
    assert len(notes) == len(report.findings) == (2 if loop == "jitted" else 1)
    assert "the script ran in its own formats" in notes[0]
    assert report.policy == "the script's own formats"
    assert "jax" in dict(report.versions)
    assert report.sampled == (1, 10)
    rows = {(row.module, row.role): row for row in report.ranges.rows}
    for name in ("first", "wide", "head"):
        for role in ("output", "grad_input"):
            row = rows[f"{name}.dot_general", role]
            assert row.form == "float16"
            assert row.reference.total == row.run.total > 0
        assert rows[f"args[0]['{name}']", "grad_weight"].form == "float32"
    assert report.ranges.form == "float16"


def test_the_step_before_broken_parameters_is_the_one_that_is_told_of(tmp_path):
    text = """
import jax
import jax.numpy as jnp
def loss_of(weights, inputs):
    with jax.named_scope("norm"):
        return jnp.sqrt((weights * inputs).sum(1)).mean()
@jax.jit
def step(weights, inputs):
    loss, grads = jax.value_and_grad(loss_of)(weights, inputs)
    return weights - 0.1 * grads, loss
weights = jnp.ones(4)
for number in range(8):
    weights, loss = step(weights, jnp.ones((2, 4)) * (number != 4))
"""
    _, report = examined(tmp_path, text)
    fault = report.diagnosis.first
    assert (fault.module, fault.operation, fault.phase) == ("norm", "div", "backward")
    assert "jnp.sqrt(safe)" in fault.remedy
    assert report.findings[0].text.endswith("(step 5).")


SCALED = """
import halfstep.jax as hsj
@hsj.autocast(policy="mixed_bfloat16")
def squares(outputs):
    return jnp.mean((outputs - targets) ** 2)
def scaled(params, scale):
    loss = squares(forward(params, inputs.astype(jnp.float16)))
    return scale.scale(loss), loss
@jax.jit
def step(params, scale):
    grads, loss = jax.grad(scaled, has_aux=True)(params, scale)
    grads = scale.unscale(grads)
    finite = hsj.all_finite(grads)
    return hsj.select_tree(finite, descended(params, grads), params), scale.adjust(finite), loss
scale = hsj.DynamicLossScale("dynamic(init_scale=FIRST)")
for _ in range(30):
    params, scale, loss = step(params, scale)
"""


def test_a_loss_scale_that_finds_its_range(tmp_path):
    text = MODEL.replace("WIDE", "2.0") + SCALED.replace("FIRST", str(2.0**8))
    done, report = examined(tmp_path, text, "--policy", "mixed_float16")
    assert (done.returncode, len(report.steps)) == (0, 30)
    first, last = report.steps[0], report.steps[-1]
    assert (first.scale, first.skipped) == (2.0**8, True)
    assert (last.scale, last.skipped) == (2.0 ** (8 - len(report.skipped)), False)
    assert any("ran under mixed_float16" in each for each in told(report, "note"))
    assert report.policy == "mixed_float16"


REGION = """
from halfstep.jax import autocast
def model(params, inputs):
    with jax.named_scope("body"):
        hidden = jnp.tanh(inputs @ params["first"])
    with jax.named_scope("tail"):
        return jnp.mean((hidden @ params["wide"] - 1) ** 2)
step = jax.jit(jax.value_and_grad(autocast(model, "mixed_float16", scale=SCALE)))
for _ in range(12):
    loss, grads = step(params, inputs)
    params = descended(params, grads)
"""


def test_a_scale_that_loses_gradients(tmp_path):
    script = MODEL.replace("WIDE", "2.0") + REGION
    _, report = examined(tmp_path, script.replace("SCALE", "2.0**-18"))
    (lost,) = [each for each in report.findings if each.severity == "warning"]
    assert "of the gradients become 0 in float16 at the scale in force, 2^-" in lost.text
    imported, text = lost.remedy.splitlines()
    assert imported == "import halfstep.jax"
    scale = text.removeprefix("halfstep.jax.autocast(f, policy, scale=").removesuffix(")")
    assert 2.0**-10 < float(scale) < 2.0**15
    _, report = examined(tmp_path, script.replace("SCALE", scale))
    assert told(report, "warning") == []


def test_a_script_that_takes_no_gradients(tmp_path):
    text = "import jax\njax.jit(lambda x: x + 1)(1.0)\n"
    done, report = examined(tmp_path, text)
    assert done.returncode == 1
    assert "halfstep.jax.diagnose(function, *arguments)" in told(report, "error")[0]


def test_steps_that_are_enough(tmp_path):
    _, report = examined(tmp_path, MODEL.replace("WIDE", "2.0") + JITTED, "--steps", "3")
    assert len(report.steps) == 3


LIBRARIES = {
    "equinox": """
import equinox as eqx, jax, jax.numpy as jnp
model = eqx.nn.MLP(16, 1, 32, 2, key=jax.random.key(0))
model = eqx.tree_at(lambda it: it.layers[1].weight, model, jnp.full((32, 32), 3e4))
def loss_of(model, inputs):
    low = jax.tree.map(lambda it: it.astype(jnp.float16) if eqx.is_array(it) else it, model)
    with jax.named_scope("mlp"):
        return jnp.mean(jax.vmap(low)(inputs) ** 2)
@eqx.filter_jit
def step(model, inputs):
    loss, grads = eqx.filter_value_and_grad(loss_of)(model, inputs)
    return eqx.apply_updates(model, grads), loss
for _ in range(4):
    model, loss = step(model, jnp.ones((4, 16), "float16"))
""",
    "flax": """
import jax, jax.numpy as jnp
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(16, 32, dtype=jnp.float16, rngs=rngs)
        self.second = nnx.Linear(32, 1, dtype=jnp.float16, rngs=rngs)
    def __call__(self, inputs):
        with jax.named_scope("mlp"):
            return self.second(self.first(inputs))
model = Model(nnx.Rngs(0))
model.second.kernel[...] = jnp.full((32, 1), 6e4)
@nnx.jit
def step(model, inputs):
    return nnx.value_and_grad(lambda model: jnp.mean(model(inputs) ** 2))(model)[0]
for _ in range(4):
    loss = step(model, jnp.full((4, 16), 4.0))
""",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_libraries_compile(tmp_path, library):
    pytest.importorskip(library)
    done, report = examined(tmp_path, LIBRARIES[library])
    assert (done.returncode, len(report.steps)) == (1, 4)
    fault = report.diagnosis.first
    assert fault.module.startswith("mlp")
    assert (fault.operation, fault.phase, fault.dtype) == ("dot_general", "forward", "float16")


LOOP = """
import jax
import jax.numpy as jnp
def loss_of(weights, row):
    with jax.named_scope("norm"):
        return jnp.sqrt((weights * row).sum()).mean()
@jax.jit
def epoch(weights, rows):
    def turn(weights, row):
        loss, grads = jax.value_and_grad(loss_of)(weights, row)
        return weights - 0.01 * grads, loss
    return jax.lax.scan(turn, weights, rows)
rows = jnp.ones((12, 4)).at[6].set(0.0)
weights = jnp.ones(4)
for _ in range(2):
    weights, losses = epoch(weights, rows)
"""


def test_a_loop_of_training_steps_within_a_compiled_function(tmp_path):
    _, report = examined(tmp_path, LOOP)
    fault = report.diagnosis.first
    assert (fault.module, fault.operation, fault.phase) == ("norm", "div", "backward")
    assert fault.note == "in turn 7 of its loop"
    assert "jnp.sqrt(safe)" in fault.remedy
    assert {"norm.mul", "norm.sqrt", "args[0]"} <= set(report.ranges.modules)
