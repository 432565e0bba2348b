import copy
import logging
import pickle

import keras
import numpy as np
import pytest

from halfstep.errors import UsageError
from halfstep.keras import LossScaleOptimizer, Monitor, SkippedSteps
from tests.keras.loops import BACKEND

X = np.random.RandomState(0).randn(64, 4).astype("float32")
Y = X.sum(axis=1, keepdims=True)
WAYS = {"interpreted": {"jit_compile": False}, "eager": {"run_eagerly": True}}
if BACKEND != "torch":
    WAYS["compiled"] = {"jit_compile": True}
NAMES = ("loss_scale", "skipped_steps")


def model_of(optimizer, **settings):
    layers = [keras.layers.Dense(3, name="first"), keras.layers.Dense(1, name="last")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="model")
    model.compile(optimizer, "mse", **settings)
    return model


def scaled(**settings):
    return LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=1024.0, **settings)


def overflowing(*batches):
    """Returns inputs whose batches of 8 hold an infinite number where they are named."""
    inputs = X.copy()
    for batch in batches:
        inputs[8 * batch] = np.inf
    return inputs


def fit(model, callbacks, inputs=X, **settings):
    settings = {"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0, **settings}
    return model.fit(inputs, Y[: len(inputs)], callbacks=callbacks, **settings)


class Seen(keras.callbacks.Callback):
    """Keeps the logs of each batch, which makes `fit` wait for each."""

    def on_train_begin(self, logs=None):
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(tuple(logs[name] for name in NAMES))


@pytest.mark.parametrize("way", WAYS)
def test_says_what_was_skipped_and_why(way):
    model = model_of(scaled(), **WAYS[way])
    monitor, seen = Monitor(every=1), Seen()
    history = fit(model, [monitor, seen], overflowing(2, 5), epochs=2)
    row = [(1024.0, 0)] * 2 + [(512.0, 1)] * 3 + [(256.0, 2)] * 3
    second = [(256.0, 2)] * 2 + [(128.0, 3)] * 3 + [(64.0, 4)] * 3
    assert seen.batches == row + second
    assert [history.history[name] for name in NAMES] == [[256.0, 64.0], [2, 4]]
    summary = monitor.summary
    assert (summary.steps, summary.skipped, summary.scale) == (16, 4, 64.0)
    assert [(each.epoch, each.batch) for each in summary.skips] == [(0, 2), (0, 5), (1, 2), (1, 5)]
    assert all(each.skipped == 1 for each in summary.skips)
    names = dict(summary.skips[0].nonfinite)
    assert names["model/first/kernel"] in ("nan", "inf and nan")
    assert summary.skips[0].reason in ("gradients held nan", "gradients held inf and nan")


@pytest.mark.parametrize("way", WAYS)
def test_without_a_callback_that_waits(way):
    model = model_of(scaled(), **WAYS[way])
    monitor = Monitor(every=1)
    fit(model, [monitor], overflowing(2, 7))
    assert [(each.first_batch, each.batch) for each in monitor.summary.skips] == [(2, 2), (7, 7)]
    assert (monitor.summary.steps, monitor.summary.skipped) == (8, 2)


@pytest.mark.parametrize("way", WAYS)
def test_only_the_variables_of_these_steps_are_named(way):
    model = model_of(scaled(), **WAYS[way])
    monitor = Monitor(every=1)
    # The bias' gradient is infinite with an infinite input, but not with a large one.
    fit(model, [monitor], overflowing(1))
    assert "model/last/bias" in dict(monitor.summary.skips[0].nonfinite)
    fit(model, [monitor], X[:8] * np.float32(1e30))
    (skips,) = monitor.summary.skips
    assert "model/first/kernel" in dict(skips.nonfinite)
    assert "model/last/bias" not in dict(skips.nonfinite)


@pytest.mark.parametrize("every", [3, 8, 100])
def test_looks_every_so_many_batches_and_at_the_end(every, monkeypatch):
    model, monitor, seen = model_of(scaled()), Monitor(every=every), Seen()
    looks = []
    look = Monitor._look
    monkeypatch.setattr(
        Monitor, "_look", lambda self, batch: (looks.append(batch), look(self, batch))
    )
    fit(model, [monitor, seen], overflowing(0, 1))
    assert looks == {3: [2, 5, 7], 8: [7, 7], 100: [7]}[every]
    (skips,) = monitor.summary.skips
    first, last = {3: (0, 2), 8: (0, 7), 100: (0, 7)}[every]
    assert (skips.skipped, skips.first_batch, skips.batch) == (2, first, last)
    assert str(skips).startswith(f"epoch 1, batches {first + 1} to {last + 1}: 2 skipped")
    assert seen.batches[0] == (1024.0, 0)
    assert seen.batches[-1] == ((1024.0, 0) if every == 100 else (256.0, 2))


@pytest.mark.skipif(BACKEND == "tensorflow", reason="Keras never runs callbacks in threads there")
def test_fit_need_not_wait_for_it():
    waits = keras.callbacks.CallbackList([Seen()])
    callbacks = keras.callbacks.CallbackList([Monitor()])
    assert (waits._async_train, callbacks._async_train) == (False, True)


@pytest.mark.skipif(BACKEND == "torch", reason="Keras refuses it there")
@pytest.mark.parametrize("way", sorted(set(WAYS) - {"eager"}))
def test_several_steps_per_execution(way):
    model = model_of(scaled(), steps_per_execution=3, **WAYS[way])
    monitor = Monitor(every=1)
    history = fit(model, [monitor], overflowing(1))
    assert history.history["skipped_steps"] == [1]
    assert monitor.summary.steps == 8
    assert str(monitor.summary.skips[0]).startswith("epoch 1, batches 1 to 3: 1 skipped")


@pytest.mark.parametrize("way", WAYS)
def test_of_keras_own_optimizer_it_tells_what_it_can(way):
    inner = keras.optimizers.SGD(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1024.0)
    model, monitor = model_of(optimizer, **WAYS[way]), Monitor(every=1)
    history = fit(model, [monitor], overflowing(2, 5), epochs=2)
    assert [history.history[name] for name in NAMES] == [[256.0, 64.0], [2, 4]]
    summary = monitor.summary
    assert [(each.epoch, each.batch) for each in summary.skips] == [(0, 2), (0, 5), (1, 2), (1, 5)]
    assert (summary.steps, summary.skips[0].nonfinite) == (16, ())
    assert summary.skips[0].reason == "gradients were not finite"


@pytest.mark.parametrize("factor", [None, 16.0])
def test_without_a_loss_scale_nothing_is_skipped(factor):
    model = model_of(keras.optimizers.SGD(0.01, loss_scale_factor=factor))
    monitor = Monitor(every=1)
    history = fit(model, [monitor])
    scale = factor or 1.0
    assert [history.history[name] for name in NAMES] == [[scale], [0]]
    assert str(monitor.summary) == f"8 steps, 0 skipped, loss scale now {scale:g}"


class Pair(keras.Sequential):
    """A model with two optimizers besides that of `compile`."""

    def compile(self, optimizers):
        super().compile(LossScaleOptimizer(keras.optimizers.SGD()), run_eagerly=True)
        self.one, self.two = optimizers

    def train_step(self, data):
        trained = self.trainable_variables
        for optimizer in (self.one, self.two):
            scale = getattr(optimizer, "loss_scale", 1.0)
            optimizer.apply([data[0][0, 0] * scale * keras.ops.ones_like(v) for v in trained])
        return {"rest": keras.ops.zeros(())}


def pair_of(*optimizers):
    model = Pair([keras.Input((4,)), keras.layers.Dense(1, name="dense")], name="pair")
    model.compile(optimizers)
    for each in optimizers:
        each.build(model.trainable_variables)
    return model


@pytest.mark.skipif(BACKEND == "jax", reason="a step on JAX has one optimizer")
def test_the_optimizers_count_that_take_steps():
    model, monitor = pair_of(scaled(), keras.optimizers.SGD(0.0, loss_scale_factor=4.0)), Monitor()
    fit(model, [monitor])
    assert str(monitor.summary) == "16 steps, 0 skipped, loss scale now 4"
    small = LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=256.0)
    model, monitor = pair_of(scaled(), small), Monitor(every=1)
    history = fit(model, [monitor], overflowing(2, 5))
    summary = monitor.summary
    assert (summary.steps, summary.skipped, summary.scale) == (16, 4, 64.0)
    assert [(each.batch, each.skipped) for each in summary.skips] == [(2, 2), (5, 2)]
    assert dict(summary.skips[1].nonfinite).keys() == {"pair/dense/kernel", "pair/dense/bias"}
    assert [history.history[name] for name in NAMES] == [[64.0], [4]]


def test_a_second_fit_goes_on_counting_but_has_its_own_summary():
    model, monitor = model_of(scaled()), Monitor()
    fit(model, [monitor], overflowing(2))
    history = fit(model, [monitor], overflowing(3))
    assert history.history["skipped_steps"] == [2]
    assert (monitor.summary.steps, monitor.summary.skipped) == (8, 1)
    assert len(monitor.summary.skips) == 1


def test_what_a_backup_restores_was_not_skipped_now(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise KeyError

    model = model_of(scaled())
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(KeyError):
        fit(model, [backup, Stop()], overflowing(2), epochs=2)
    model, monitor = model_of(scaled()), Monitor()
    history = fit(model, [keras.callbacks.BackupAndRestore(tmp_path / "backup"), monitor], epochs=2)
    assert history.history["skipped_steps"] == [1]
    assert (monitor.summary.steps, monitor.summary.skipped) == (8, 0)


def test_speaks_in_pythons_log(caplog):
    caplog.set_level(logging.INFO, logger="halfstep.keras")
    fit(model_of(scaled()), [Monitor(every=1)], overflowing(2))
    skips, summary = [each.getMessage() for each in caplog.records]
    assert skips.startswith("epoch 1, batch 3: 1 skipped, gradients held")
    assert "model/first/kernel (" in skips
    assert summary == f"8 steps, 1 skipped, loss scale now 512\n{skips}"


def test_a_long_summary_is_shortened():
    monitor = Monitor()
    monitor._skips.extend(SkippedSteps(0, batch, 1, 8.0) for batch in range(12))
    lines = str(monitor.summary).splitlines()
    assert len(lines) == 12
    assert lines[1] == "2 earlier ones in Monitor.summary.skips"


def test_can_be_copied_and_pickled_before_it_is_used():
    for monitor in (copy.deepcopy(Monitor(every=3)), pickle.loads(pickle.dumps(Monitor(every=3)))):
        fit(model_of(scaled()), [monitor], overflowing(2))
        assert monitor.summary.skipped == 1


@pytest.mark.parametrize("every", [0, -1, 1.5, True, None])
def test_every_is_a_number_of_batches(every):
    with pytest.raises(UsageError, match=r"Monitor needs every >= 1.*got .*Write every=1"):
        Monitor(every=every)
