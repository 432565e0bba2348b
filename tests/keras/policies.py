"""What the tests of policies share. The backend is that of KERAS_BACKEND, JAX without one."""

import importlib.util
import os
import sys
import types

import numpy as np
import pytest

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras")

from halfstep.keras import set_global_policy  # noqa: E402
from halfstep.keras._private import found  # noqa: E402

LOSS_SCALE_OPTIMIZER = "halfstep.keras._loss_scale_optimizer"


def stand_in_for_the_optimizer():
    """Lets Keras' own optimizer stand in while this package has none."""
    if LOSS_SCALE_OPTIMIZER in sys.modules or importlib.util.find_spec(LOSS_SCALE_OPTIMIZER):
        return

    class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
        def __init__(self, inner_optimizer, loss_scale=None, **options):
            initial = {} if loss_scale is None else {"initial_scale": loss_scale.init_scale}
            super().__init__(inner_optimizer, **initial, **options)

    module = types.ModuleType(LOSS_SCALE_OPTIMIZER)
    module.LossScaleOptimizer = LossScaleOptimizer
    sys.modules[LOSS_SCALE_OPTIMIZER] = module


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
    stand_in_for_the_optimizer()
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
