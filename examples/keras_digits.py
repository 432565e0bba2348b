"""Trains a small Keras CNN on scikit-learn's 1,797 scanned digits, reports held-out accuracy.

By itself it trains in float32, on the backend that KERAS_BACKEND names; halfstep runs it once per
policy:

    python examples/keras_digits.py
    halfstep compare examples/keras_digits.py --seeds 3
"""

import argparse

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import halfstep


def load_data():
    """Returns (train images, train labels, held-out images, held-out labels)."""
    digits = load_digits()
    images = digits.images.astype("float32")[..., None] / 16.0
    # The split is the same for every seed, so that seeds differ only in how they train.
    train, held_out = np.split(np.random.RandomState(0).permutation(len(images)), [1437])
    return images[train], digits.target[train], images[held_out], digits.target[held_out]


def build_model():
    """Returns the network: two convolutions, then two linear layers."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            # The normalisation takes a bias away again: its gradient is nothing but rounding.
            layers.Conv2D(32, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.Conv2D(64, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main():
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, help="without it, whatever seed the process has")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        keras.utils.set_random_seed(arguments.seed)
    train_images, train_labels, test_images, test_labels = load_data()
    model = build_model()
    model.compile(keras.optimizers.AdamW(2e-3), "sparse_categorical_crossentropy")
    model.fit(train_images, train_labels, batch_size=64, epochs=arguments.epochs, verbose=0)
    predictions = model.predict(test_images, verbose=0).argmax(axis=1)
    result = float((predictions == test_labels).mean())
    halfstep.metric("accuracy", result)
    print(f"held-out accuracy {result:.4f}")


if __name__ == "__main__":
    main()
