"""Keras' own tests of its loss-scale optimizer, from its wheel, run with ours.

All of them pass on each backend, also those that Keras skips on JAX because its optimizer cannot
step eagerly there. `stateless_apply` stays out on TensorFlow, where Keras has none.
"""

import importlib

import pytest
from keras import backend

from halfstep.keras import LossScaleOptimizer
from halfstep.keras._stepping._usage import Usage

OWN = importlib.import_module("keras.src.optimizers.loss_scale_optimizer_test")


class TestKerassOwn(OWN.LossScaleOptimizerTest):
    @pytest.fixture(autouse=True)
    def ours(self, monkeypatch):
        monkeypatch.setattr(OWN, "LossScaleOptimizer", LossScaleOptimizer)
        # These tests scale gradients by themselves, of which test_usage.py shows the warning.
        monkeypatch.setattr(Usage, "was_forgotten", lambda usage, rule: False)

    def _skip_test_for_stateless(self, stateless):
        if stateless and backend.backend() == "tensorflow":
            self.skipTest("stateless_apply is not supported with the TF backend.")
