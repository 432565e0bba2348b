"""What callbacks of Keras show of a monitor, before and behind it in the list."""

import csv
from importlib.util import find_spec

import keras
import pytest

from halfstep.keras import Monitor
from tests.keras.test_monitor import Seen, X, Y, fit, model_of, overflowing, scaled

ORDERS = {"first": lambda *others: [Monitor(every=1), *others]}
ORDERS["last"] = lambda *others: [*others, Monitor(every=1)]


@pytest.mark.parametrize("order", ORDERS)
def test_csv_logger(order, tmp_path):
    logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    fit(model_of(scaled()), ORDERS[order](logger), overflowing(2), epochs=2)
    rows = list(csv.DictReader((tmp_path / "log.csv").read_text().splitlines()))
    assert [float(row["loss_scale"]) for row in rows] == [512.0, 256.0]
    assert [row["skipped_steps"] for row in rows] == ["1", "2"]


@pytest.mark.parametrize("order", ORDERS)
def test_history_and_batches(order):
    seen, history = Seen(), keras.callbacks.History()
    result = fit(model_of(scaled()), ORDERS[order](history, seen), overflowing(2))
    assert result is history
    assert history.history["skipped_steps"] == [1]
    assert seen.batches == [(1024.0, 0)] * 2 + [(512.0, 1)] * 6


@pytest.mark.parametrize("verbose", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_progress_bar(order, verbose, capsys):
    fit(model_of(scaled()), ORDERS[order](), overflowing(2), verbose=verbose)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert "loss_scale: 512.0000" in last
    assert "skipped_steps: 1.0000" in last


def test_callbacks_that_act_on_a_log():
    stop = keras.callbacks.EarlyStopping(monitor="skipped_steps", mode="min", patience=0)
    history = fit(model_of(scaled()), [stop, Monitor()], overflowing(2), epochs=5)
    assert len(history.history["loss"]) == 2


def test_validation_has_no_scale():
    model = model_of(scaled())
    history = fit(model, [Monitor()], validation_data=(X, Y))
    assert "val_loss" in history.history
    assert "val_loss_scale" not in history.history
    assert model.evaluate(X, Y, verbose=0, callbacks=[Monitor()]) > 0


def test_other_callbacks_keep_their_order():
    others = [Seen(), Seen(), Seen()]
    callbacks = keras.callbacks.CallbackList(
        [*others[:2], Monitor(), others[2]], model=model_of(scaled())
    )
    assert isinstance(callbacks.callbacks[0], Monitor)
    assert callbacks.callbacks[1:] == others
    assert all(each._model is not None for each in callbacks.callbacks)


@pytest.mark.skipif(
    find_spec("tensorboard") is None or find_spec("tensorflow") is None,
    reason="Keras' TensorBoard callback needs both packages",
)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_tensorboard(order, tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    board = keras.callbacks.TensorBoard(tmp_path, update_freq=1)
    fit(model_of(scaled()), ORDERS[order](board), overflowing(2))
    events = [
        each
        for path in (tmp_path / "train").glob("*v2")
        for each in EventFileLoader(str(path)).Load()
    ]
    values = [each for event in events for each in event.summary.value if "keras" not in each.tag]
    found = {}
    for value in values:
        found.setdefault(value.tag, []).append(float(make_ndarray(value.tensor)))
    assert found["epoch_loss_scale"] == [512.0]
    assert found["batch_skipped_steps"] == [0.0] * 2 + [1.0] * 6
