"""What the tests of policies share."""

import types

import keras
import numpy as np
import pytest

from halfstep.keras import set_global_policy
from halfstep.keras._private import found


def patched():
    """Returns everything of Keras that a policy may replace."""
    modules = ("backend.nn", "backend.numpy", "backend.math", "backend.linalg", "ops.nn")
    layers = ("Layer", "Softmax", "Normalization", "Rescaling", "GlobalAveragePooling1D")
    owners = [*modules, *(f"layers.{name}" for name in layers), "trainers.trainer.Trainer"]
    return [functions(found(owner)) for owner in owners] + [found("backend.core").remat]


def functions(owner):
    kinds = types.FunctionType, property
    return {name: each for name, each in vars(owner).items() if isinstance(each, kinds)}


@pytest.fixture(autouse=True)
def nothing_left():
    before = patched()
    yield
    set_global_policy("float32")
    assert patched() == before


def dtype_of(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def array(tensor):
    return np.array(keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32")))


def classifier(activation="softmax", units=10):
    return keras.Sequential(
        [
            keras.Input((16,)),
            keras.layers.Dense(32, activation="relu", name="body"),
            keras.layers.Dense(units, activation=activation, name="head"),
        ],
        name="classifier",
    )


class Model(keras.Model):
    """A layer as a model."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.supports_masking = layer, True

    def call(self, inputs, **options):
        return self.layer(inputs, **options)


def noise(rows=256):
    draw = np.random.RandomState(0)
    return draw.randn(rows, 16).astype("float32") * 2, draw.randint(0, 10, rows)
