"""`halfstep doctor` on loops of Keras whose loss is written by hand: backward is looked at, too."""

import pytest

from tests.cli.doctor_scripts import examined, told
from tests.cli.test_doctor_keras import backend as backend

pytestmark = pytest.mark.slow

# The root of a sum of squares has no slope at 0.
MODEL = """
import numpy as np
import keras
from keras import ops
keras.utils.set_random_seed(0)
x = np.random.RandomState(0).rand(32, 4).astype("float32")
y = x.mean(1, keepdims=True)
class Norm(keras.layers.Layer):
    def call(self, inputs):
        return ops.sqrt(ops.sum(ops.square(inputs), axis=-1, keepdims=True))
body = keras.layers.Dense(4, name="body", kernel_initializer=START)
head = keras.layers.Dense(1, name="head")
model = keras.Sequential([keras.Input((4,)), body, Norm(name="norm"), head], name="model")
optimizer = keras.optimizers.SGD(0.01)
optimizer.build(model.trainable_variables)
def loss_of(outputs, targets):
    return ops.mean((outputs - targets) ** 2) LOSS
"""
TAPE = """
import tensorflow as tf
COMPILED
def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(model(x, training=True), y)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
for _ in range(4):
    step(x, y)
"""
STATELESS = """
import jax
def loss_and_state(trained, others, x, y):
    outputs, others = model.stateless_call(trained, others, x, training=True)
    return loss_of(outputs, y), others
take = jax.value_and_grad(loss_and_state, has_aux=True)
COMPILED
def step(trained, others, state, x, y):
    (loss, others), gradients = take(trained, others, x, y)
    trained, state = optimizer.stateless_apply(state, gradients, trained)
    return trained, others, state
kept = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
kept = [[each.value for each in values] for values in kept]
for _ in range(4):
    kept = step(*kept, x, y)
"""
HOOKED = """
import torch
own = torch.optim.SGD(model.parameters(), 0.01)
for _ in range(4):
    own.zero_grad()
    loss_of(model(torch.tensor(x), training=True), torch.tensor(y)).backward()
    own.step()
"""
LOOPS = {
    "tensorflow": {"eager": TAPE, "compiled": TAPE.replace("COMPILED", "@tf.function")},
    "jax": {"eager": STATELESS, "compiled": STATELESS.replace("COMPILED", "@jax.jit")},
    "torch": {"eager": HOOKED},
}
OWN_STEP = """
class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = model
    def call(self, inputs):
        return self.inner(inputs)
STEP
model = Own()
model.compile("sgd")
model.fit(x, y, epochs=2, verbose=0)
"""
STEPS = {
    "tensorflow": """
    def train_step(self, data):
        import tensorflow as tf
        with tf.GradientTape() as tape:
            loss = loss_of(self(data[0], training=True), data[1])
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}
""",
    "jax": """
    def train_step(self, state, data):
        import jax
        trained, others, own, metrics = state
        def loss_and_state(trained):
            outputs, kept = self.stateless_call(trained, others, data[0])
            return loss_of(outputs, data[1]), kept
        (loss, others), gradients = jax.value_and_grad(loss_and_state, has_aux=True)(trained)
        trained, own = self.optimizer.stateless_apply(own, gradients, trained)
        return {"loss": loss}, (trained, others, own, metrics)
""",
    "torch": """
    def train_step(self, data):
        import torch
        self.zero_grad()
        loss = loss_of(self(data[0], training=True), data[1])
        loss.backward()
        gradients = [each.value.grad for each in self.trainable_variables]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}
""",
}


def made(start="'zeros'", loss=""):
    return MODEL.replace("START", start).replace("LOSS", loss)


def loop_of(backend, way):
    if way not in LOOPS[backend]:
        pytest.skip(f"a loop on {backend} is not {way}")
    return LOOPS[backend][way].replace("COMPILED", "")


def check(report, module="norm"):
    fault = report.diagnosis.first
    assert (fault.module, fault.operation, fault.phase) == (module, "sqrt", "backward")
    assert (fault.role, fault.in_float32) == ("grad_input", True)
    assert not any("forward only" in each for each in told(report, "note"))


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_a_gradient_of_a_loop(tmp_path, backend, way):
    _, report = examined(tmp_path, made() + loop_of(backend, way), "--policy", "float32")
    assert len(report.steps) == 4
    check(report)


def test_a_gradient_of_a_train_step(tmp_path, backend):
    text = made() + OWN_STEP.replace("STEP", STEPS[backend])
    _, report = examined(tmp_path, text, "--policy", "float32")
    check(report, "model/norm")


def test_a_loss_that_is_not_finite_is_not_the_models(tmp_path, backend):
    text = made(start="'ones'", loss="* ops.log(ops.zeros(()))") + loop_of(backend, "eager")
    _, report = examined(tmp_path, text, "--policy", "float32")
    assert not report.diagnosis
    assert any("was made outside of every model" in each for each in told(report, "error"))


def test_a_healthy_loop_has_gradients_in_every_row(tmp_path, backend):
    text = made(start="'ones'") + loop_of(backend, "eager")
    done, report = examined(tmp_path, text, "--policy", "float32")
    assert (done.returncode, told(report, "note")) == (0, [])
    roles = {"output", "grad_output", "grad_input", "grad_weight"}
    assert {row.role for row in report.ranges.rows if row.module == "head"} == roles


def test_a_model_that_nothing_comes_back_to_is_looked_at_forward_only(tmp_path, backend):
    if backend != "tensorflow":
        pytest.skip("a tape takes gradients of what it watches")
    text = made(start="'ones'") + loop_of(backend, "eager").replace(
        "as tape:\n", "as tape:\n        y = tf.stop_gradient(model(x)) + y * 0\n"
    ).replace("model(x, training=True)", "body(x)")
    _, report = examined(tmp_path, text, "--policy", "float32")
    (note,) = [each for each in told(report, "note") if "forward only" in each]
    assert note.startswith("model was looked at forward only, because no gradient was seen")
