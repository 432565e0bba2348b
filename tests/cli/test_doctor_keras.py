"""`halfstep doctor` on scripts of Keras that know nothing of halfstep, on each backend."""

import pytest

from tests.cli.doctor_scripts import examined, told
from tests.cli.test_keras import BACKENDS, COMPILERS, LOOPS, compiler

pytestmark = pytest.mark.slow

MODEL = """
import numpy as np
import keras
keras.utils.set_random_seed(0)
inputs = np.random.RandomState(0).rand(64, 16).astype("float32")
targets = inputs.mean(1, keepdims=True)
names = ("first", "wide")
layers = [keras.layers.Dense(8, "relu", name=name, use_bias=False) for name in names]
norm = keras.layers.LayerNormalization(name="norm")
model = keras.Sequential([keras.Input((16,)), *layers, norm, keras.layers.Dense(1, name="head")])
"""
BROKEN = """
layers[0].set_weights([np.full((16, 8), 3.0)])
layers[1].set_weights([np.full((8, 8), 3e4)])
"""
FIT = """
optimizer = keras.optimizers.SGD(0.01)
model.compile(optimizer, "mse", steps_per_execution=EXECUTED)
model.fit(inputs, targets, batch_size=16, epochs=EPOCHS, verbose=0)
"""
OWN_STEP = """
class Own(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def call(self, inputs):
        return self.inner(inputs)
    def train_step(self, *args):
        return super().train_step(*args)
model = Own(model)
"""


def fit(epochs=2, executed=1):
    return FIT.replace("EXECUTED", str(executed)).replace("EPOCHS", str(epochs))


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    pytest.importorskip("keras")
    monkeypatch.setenv("KERAS_BACKEND", request.param)
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    return request.param


def check_broken(done, report, module="wide"):
    assert done.returncode == 1
    fault = report.diagnosis.first
    assert (fault.module, fault.operation, fault.phase) == (module, "matmul", "forward")
    assert (fault.kind, fault.dtype, fault.largest) == ("inf", "float16", 30000.0)
    assert 'name="wide"' in report.findings[0].remedy
    assert 'dtype="float32"' in report.findings[0].remedy
    assert report.findings[0].text.endswith("(step 1).")


def test_a_layer_that_overflows_in_fit(tmp_path, backend):
    check_broken(*examined(tmp_path, MODEL + BROKEN + fit()))


def test_a_healthy_fit(tmp_path, backend):
    done, report = examined(tmp_path, MODEL + fit(epochs=10))
    assert done.returncode == 0, report.findings
    assert len(report.steps) == 40
    assert report.steps[-1].loss < 1
    assert told(report, "error") == told(report, "warning") == []
    # The first one was skipped as the scale finds its range, so one that was taken is looked at.
    taken = next(step.number for step in report.steps if not step.skipped)
    assert report.sampled == (1, taken, 10)
    assert {"first", "wide", "norm", "head"} == set(report.ranges.modules)


def test_several_steps_at_once(tmp_path, backend):
    if backend == "torch":
        pytest.skip("Keras has none on PyTorch")
    check_broken(*examined(tmp_path, MODEL + BROKEN + fit(executed=2)))


def test_a_train_step_of_the_models_own(tmp_path, backend):
    done, report = examined(tmp_path, MODEL + BROKEN + OWN_STEP + fit())
    check_broken(done, report, "sequential/wide")


def test_weights_that_the_step_before_has_broken(tmp_path, backend):
    # The root of nothing has no slope: gradients are NaN, and the loss is not before the next step.
    text = MODEL.replace(
        "norm = ", "norm = keras.layers.Lambda(keras.ops.sqrt, name='root') if 1 else "
    )
    text += "layers[1].set_weights([np.zeros((8, 8))])\n"
    _, report = examined(tmp_path, text + fit(), "--policy", "float32")
    fault = report.diagnosis.first
    assert (fault.module, fault.phase, fault.in_float32) == ("root", "backward", True)


SCALED_LOOPS = LOOPS | {
    "tensorflow": LOOPS["tensorflow"]
    .replace("loss = loss_of(targets, model(inputs))", "loss = LOSS")
    .replace("LOSS", "optimizer.scale_loss(loss_of(targets, model(inputs)))")
}
LOOP = """
loss_of = keras.losses.MeanSquaredError()
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=SCALE)
optimizer.build(model.trainable_variables)
"""


def loop(backend, compiled, scale):
    ways = COMPILERS[backend]
    if compiled and len(ways) == 1:
        pytest.skip(f"a loop on {backend} is not compiled")
    text = SCALED_LOOPS[backend].replace("COMPILE", compiler(ways[-compiled]))
    return LOOP.replace("SCALE", str(scale)) + text


@pytest.mark.parametrize("compiled", [False, True])
def test_loops_of_the_script_itself(tmp_path, backend, compiled):
    check_broken(*examined(tmp_path, MODEL + BROKEN + loop(backend, compiled, 8.0)))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_scale_that_is_too_large_for_a_loop(tmp_path, backend, compiled):
    text = MODEL + loop(backend, compiled, 2.0**30)
    done, report = examined(tmp_path, text)
    assert (done.returncode, len(report.skipped)) == (1, 6)
    assert [step.scale for step in report.steps] == [2.0 ** (30 - index) for index in range(6)]
    fault = report.diagnosis.first
    # What is cast is the gradient that the loss hands to the model.
    assert (fault.module, fault.operation) == ("mean_squared_error", "cast")
    assert (fault.phase, fault.dtype) == ("backward", "float16")
    assert "LossScaleOptimizer" in fault.remedy


def test_gradients_that_become_zero(tmp_path, backend):
    text = """
class Small(keras.losses.Loss):
    def call(self, targets, outputs):
        return keras.ops.mean((outputs - targets) ** 2, -1) * 2.0**-22
"""
    text += loop(backend, False, 1.0).replace("keras.losses.MeanSquaredError()", "Small()")
    _, report = examined(tmp_path, MODEL + text)
    (lost,) = [each for each in report.findings if "of the gradients become 0" in each.text]
    assert lost.severity == "warning"
    written = "optimizer = halfstep.keras.LossScaleOptimizer(optimizer, initial_scale="
    assert lost.remedy == f"import halfstep.keras\n{written}2.0**{report.ranges.power})"
    assert report.power == 0 < report.ranges.power
    roles = {"output", "grad_output", "grad_input", "grad_weight"}
    assert {row.role for row in report.ranges.rows if row.module == "wide"} == roles
