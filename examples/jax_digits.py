"""Trains a small CNN in plain JAX on scikit-learn's 1,797 scanned digits, reports accuracy.

By itself it runs as `autocast` decides (bfloat16); give it another policy to compare:

    python examples/jax_digits.py
    python examples/jax_digits.py --policy mixed_float16
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from sklearn.datasets import load_digits

import halfstep
from halfstep.jax import autocast


def load_data():
    """Returns (train images, train labels, held-out images, held-out labels)."""
    digits = load_digits()
    images = digits.images.astype("float32")[..., None] / 16.0
    labels = digits.target.astype("int32")
    # The split is the same for every seed, so that seeds differ only in how they train.
    train, held_out = np.split(np.random.RandomState(0).permutation(len(images)), [1437])
    return images[train], labels[train], images[held_out], labels[held_out]


def build_model(key):
    """Returns the parameters of two convolutions and two linear layers."""
    shapes = [(3, 3, 1, 32), (3, 3, 32, 64), (4 * 4 * 64, 128), (128, 10)]
    keys = jax.random.split(key, len(shapes))
    return [
        (jax.random.normal(each, shape) * (2 / np.prod(shape[:-1])) ** 0.5, jnp.zeros(shape[-1]))
        for each, shape in zip(keys, shapes, strict=True)
    ]


def forward(params, images):
    """Returns the logits."""
    x = images
    for kernel, bias in params[:2]:
        layout = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout)
        x = jax.nn.relu(x + bias)
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    (weights, bias), (head, head_bias) = params[2:]
    x = jax.nn.relu(x.reshape(len(x), -1) @ weights + bias)
    return x @ head + head_bias


def loss(params, images, labels):
    """Returns the mean cross-entropy."""
    rows = jax.nn.log_softmax(forward(params, images))
    return -jnp.mean(jnp.take_along_axis(rows, labels[:, None], axis=1))


def make_step(policy, rate):
    """Returns a jitted training step: stochastic gradient descent with momentum."""
    gradient_of = jax.grad(autocast(loss, policy))

    @jax.jit
    def step(params, momentum, images, labels):
        gradient = gradient_of(params, images, labels)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        return jax.tree.map(lambda p, m: p - rate * m, params, momentum), momentum

    return step


def train(params, images, labels, epochs, policy, order):
    """Trains and returns the parameters."""
    step, momentum = make_step(policy, 0.02), jax.tree.map(jnp.zeros_like, params)
    for _ in range(epochs):
        for batch in order.permutation(len(images))[:1408].reshape(22, 64):
            params, momentum = step(params, momentum, images[batch], labels[batch])
    return params


def main():
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train_images, train_labels, test_images, test_labels = load_data()
    params = build_model(jax.random.key(arguments.seed))
    order = np.random.RandomState(arguments.seed)
    params = train(params, train_images, train_labels, arguments.epochs, arguments.policy, order)
    logits = jax.jit(autocast(forward, arguments.policy))(params, test_images)
    result = float((np.asarray(logits).argmax(axis=1) == test_labels).mean())
    halfstep.metric("accuracy", result)
    print(f"held-out accuracy {result:.4f}")


if __name__ == "__main__":
    main()
