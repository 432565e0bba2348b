"""A callback that shows the loss scale and the skipped steps of a training."""

import logging
import numbers
import sys
import threading
from collections import deque
from typing import Any

import keras

from halfstep.errors import UsageError
from halfstep.keras._monitoring._readings import Reading, Several, Source, source_of
from halfstep.keras._monitoring._summary import SkippedSteps, TrainingSummary

_KEPT = 1000
_log = logging.getLogger("halfstep.keras")


class Monitor(keras.callbacks.Callback):
    """Puts the loss scale and the skipped steps into the logs of `fit`.

    The names are `loss_scale` and `skipped_steps`; the progress bar, `History`, `CSVLogger`,
    `TensorBoard` and other callbacks of Keras show them. For that the monitor moves itself to the
    front of the list of callbacks, wherever it was given. Which steps were skipped and whose
    gradients were not finite is in `summary`, and in Python's log "halfstep.keras" at level INFO.

    With another optimizer than `halfstep.keras.LossScaleOptimizer` the names of variables are not
    known, and without a loss scale nothing is skipped: the scale is 1. Of a model with several
    optimizers, those count that were asked for steps: the sums, and the lowest scale.

    Args:
        every: After how many batches to look at the optimizer, which waits for the device; at the
            end of an epoch it looks in any case. In between, the logs repeat what it saw last.

    Raises:
        UsageError: If `every` is not a whole number above zero.

    Example:
        >>> import keras, numpy
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, name="dense")])
        >>> model.compile(LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0), "mse")
        >>> monitor, inputs = Monitor(every=1), numpy.array([[1.0], [numpy.inf]])
        >>> settings = {"batch_size": 1, "shuffle": False, "verbose": 0}
        >>> history = model.fit(inputs, inputs, callbacks=[monitor], **settings)
        >>> history.history["skipped_steps"], history.history["loss_scale"]
        ([1], [4.0])
        >>> monitor.summary.skipped, monitor.summary.skips[0].batch
        (1, 1)
    """

    # Then `fit` need not wait for the device after each batch, as it does for other callbacks.
    async_safe = True

    def __init__(self, every: int = 10) -> None:
        super().__init__()
        self.every = _checked(every)
        self._start = self._now = Reading(0, 0, 1.0)
        self._skips: deque[SkippedSteps] = deque(maxlen=_KEPT)
        self._epoch = self._batches = 0
        self._ended: list[int] = []

    @property
    def summary(self) -> TrainingSummary:
        """What was seen of the latest training up to now."""
        steps, skipped = (
            getattr(self._now, name) - getattr(self._start, name) for name in ("steps", "skipped")
        )
        return TrainingSummary(steps, skipped, self._now.scale, tuple(self._skips))

    def set_model(self, model: Any) -> None:
        """Takes the model of a training, and the first place among the callbacks.

        Args:
            model: The model.
        """
        super().set_model(model)
        _move_to_front(self)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to count.

        Args:
            logs: Nothing.
        """
        self._source: Source | Several | None = None
        self._batches = 0
        self._skips.clear()
        self._thread = threading.get_ident()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Starts to count the batches of an epoch.

        Args:
            epoch: The number of the epoch.
            logs: Nothing.
        """
        if self._source is None:
            # Not when the training begins, as BackupAndRestore then still loads the counts.
            self._source = source_of(self.model)
            self._start = self._now = self._source.read(0)
        self._epoch = epoch
        self._ended = []
        self._seen, self._due, self._looked = -1, self.every, -1

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the step before, if it is due and was not done at its end.

        Args:
            batch: The number of the batch.
            logs: Nothing.
        """
        self._after(batch - 1)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the optimizer if it is due, and puts into the logs what was seen last.

        Args:
            batch: The number of the batch.
            logs: The metrics of the epoch up to now.
        """
        self._ended.append(batch)
        # In another thread, JAX would have donated the values to the next step already.
        if threading.get_ident() == self._thread:
            self._after(batch)
        self._show(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks at the optimizer, and puts what it sees into the logs.

        Args:
            epoch: The number of the epoch.
            logs: The metrics of the epoch.
        """
        last = max(self._ended, default=-1)
        self._look(last)
        self._batches += last + 1
        self._show(logs)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Logs the summary.

        Args:
            logs: The metrics of the last epoch.
        """
        _log.info("%s", self.summary)

    def _after(self, batch: int) -> None:
        if batch > self._seen:
            self._seen = batch
            if batch + 1 >= self._due:
                self._due = batch + 1 + self.every
                self._look(batch)

    def _look(self, batch: int) -> None:
        assert self._source is not None
        before, self._now = self._now, self._source.read(self._batches + batch + 1)
        first, self._looked = min(self._looked + 1, batch), batch
        skipped = self._now.skipped - before.skipped
        if skipped > 0:
            names = self._source.culprits()
            skips = SkippedSteps(self._epoch, batch, skipped, self._now.scale, names, first)
            self._skips.append(skips)
            _log.info("%s", skips)

    def _show(self, logs: dict[str, Any] | None) -> None:
        if logs is not None:
            now = self._now
            logs.update(loss_scale=now.scale, skipped_steps=now.skipped)


def _checked(every: Any) -> int:
    whole = isinstance(every, numbers.Integral) and not isinstance(every, bool)
    if whole and every >= 1:
        return int(every)
    raise UsageError(
        f"Monitor needs every >= 1, a number of batches, got {every!r}. Write every=1 to look "
        "after each batch."
    )


def _move_to_front(monitor: Monitor) -> None:
    """Gives the monitor the first place, as callbacks see only what those before them logged."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList) and monitor in owner.callbacks:
            # They are being iterated; no place behind that of the monitor changes.
            owner.callbacks.remove(monitor)
            owner.callbacks.insert(0, monitor)
            return
        frame = frame.f_back
