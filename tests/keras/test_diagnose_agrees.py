"""A diagnosis finds something in exactly those runs whose own gradients are not finite."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

from halfstep.keras import diagnose, set_global_policy
from tests.keras.loops import BACKEND
from tests.keras.policies import array, nothing_left  # noqa: F401


class Block(keras.Model):
    """A small transformer."""

    def __init__(self):
        super().__init__(name="block")
        self.words = layers.Embedding(20, 16, name="words")
        self.norm = layers.LayerNormalization(name="norm")
        self.attention = layers.MultiHeadAttention(2, 8, name="attention")
        self.up = layers.Dense(32, activation="gelu", name="up")
        self.down = layers.Dense(16, name="down")
        self.head = layers.Dense(20, activation="softmax", name="head")

    def call(self, tokens):
        hidden = self.words(tokens)
        normed = self.norm(hidden)
        hidden = hidden + self.attention(normed, normed, use_causal_mask=True)
        return self.head(hidden + self.down(self.up(hidden)))


def by_tensorflow(model, loss_of, scale):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = loss_of(model) * scale
    grads = tape.gradient(loss, model.trainable_variables)
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in grads]


def by_jax(model, loss_of, scale):
    return compiled_by_jax(model, loss_of)(
        [each.value for each in model.trainable_variables], scale
    )


@functools.cache
def compiled_by_jax(model, loss_of):
    import jax

    def loss(values, scale):
        with keras.StatelessScope(zip(model.trainable_variables, values, strict=True)):
            return loss_of(model) * scale

    return jax.jit(jax.grad(loss))


def by_torch(model, loss_of, scale):
    (loss_of(model) * scale).backward()
    grads = [each.value.grad for each in model.trainable_variables]
    model.zero_grad()
    return grads


GRADIENTS = {"tensorflow": by_tensorflow, "jax": by_jax, "torch": by_torch}[BACKEND]


def finite(grads):
    return all(np.isfinite(array(each)).all() for each in grads)


@pytest.mark.parametrize("safe", [True, False])
def test_with_the_gradients_of_the_backend(safe):
    if BACKEND == "jax" and not safe:
        pytest.skip("JAX has no attention in float16 on a CPU")
    set_global_policy("mixed_float16", safe=safe)
    tokens = np.random.RandomState(0).randint(0, 20, (4, 6))
    model, loss = Block(), keras.losses.SparseCategoricalCrossentropy()
    model(tokens)
    model.up.set_weights([each * 50 for each in model.up.get_weights()])
    outcomes = []

    def loss_of(own):
        return loss(tokens, own(tokens, training=True))

    for scale in (2.0**-4, 2.0**9, 2.0**16):
        found = diagnose(model, tokens, tokens, loss, loss_scale=scale)
        outcomes.append(finite(GRADIENTS(model, loss_of, scale)))
        assert bool(found) != outcomes[-1]
    assert outcomes[0]
    assert not outcomes[-1]
