"""Models train by a policy without `fit`."""

import numpy as np

from halfstep.keras import set_global_policy
from tests.keras.policies import array, classifier, keras, noise, nothing_left  # noqa: F401

BACKEND = keras.config.backend()


def test_a_custom_loop_meets_a_float32_output():
    set_global_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    model, (inputs, targets) = classifier(), noise(64)
    before = model.get_weights()
    dtypes = LOOPS[BACKEND](model, keras.losses.SparseCategoricalCrossentropy(), inputs, targets)
    assert dtypes == {"float32"}
    moved = [np.abs(a - b).max() for a, b in zip(before, model.get_weights(), strict=True)]
    assert all(0 < each < 1 for each in moved)


def jax_loop(model, loss_of, inputs, targets):
    import jax

    seen = set()

    def loss(trainable, rest):
        outputs, rest = model.stateless_call(trainable, rest, inputs, training=True)
        seen.add(str(outputs.dtype))
        return 1024 * loss_of(targets, outputs), rest

    trainable = [each.value for each in model.trainable_variables]
    rest = [each.value for each in model.non_trainable_variables]
    gradients, _ = jax.jit(jax.grad(loss, has_aux=True))(trainable, rest)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(gradient / 10240)
    return seen


def tensorflow_loop(model, loss_of, inputs, targets):
    import tensorflow as tf

    seen = set()

    @tf.function
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            seen.add(outputs.dtype.name)
            loss = 1024 * loss_of(targets, outputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
            variable.assign_sub(gradient / 10240)

    step(tf.constant(inputs), tf.constant(targets))
    return seen


def torch_loop(model, loss_of, inputs, targets):
    import torch

    outputs = model(torch.tensor(inputs), training=True)
    (1024 * loss_of(targets, outputs)).backward()
    with torch.no_grad():
        for variable in model.trainable_variables:
            variable.value.sub_(variable.value.grad / 10240)
    return {str(outputs.dtype).removeprefix("torch.")}


LOOPS = {"jax": jax_loop, "tensorflow": tensorflow_loop, "torch": torch_loop}
