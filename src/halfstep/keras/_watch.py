"""Makes a Keras script that knows nothing of halfstep visible, without changing a number.

Around each call of a model's train function, the sums of its losses and the counters of its
optimizer are read before and after. What runs inside, compiled or not, stays as it is.
"""

import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import keras

from halfstep.core import Policy, emit, quiet, replace
from halfstep.keras._global import global_policy
from halfstep.keras._optimizers import optimizers_of
from halfstep.keras._patches import Undo
from halfstep.keras._policies import LOW, read
from halfstep.keras._readings import Reading, Sum, by_state, by_variable, reading, sums

NONFINITE = "a gradient was not finite"
# What PyTorch's side would tell of a step that this side tells of.
_TOLD_HERE = ("backward", "loss", "step", "update", "scale")
_Look = tuple[list[Sum], list[tuple[Any, Reading]]]


class _Inside(threading.local):
    step = False
    fit = False


inside = _Inside()


@dataclass(frozen=True)
class Step:
    """What became of a step that an optimizer was asked for.

    Args:
        skipped: Whether it was not taken.
        reason: Why not, "" if it was.
        scale: What the loss was multiplied by.
    """

    skipped: bool = False
    reason: str = ""
    scale: float = 1.0


class Models:
    """The models that trained so far, which are not kept alive, and what they computed in."""

    def __init__(self) -> None:
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        self.lowered: bool | None = None

    def note(self, model: Any) -> None:
        """Tells about a model that trains for the first time."""
        if model in self._seen:
            return
        self._seen.add(model)
        low = any(each.compute_dtype in LOW for each in model._flatten_layers() if _works(each))
        self.lowered = low or bool(self.lowered)
        if low:
            emit("region", policy=str(_policy_of(model)))


def watch(models: Models) -> Undo:
    """Tells about the losses, steps and evaluations of `fit`, `train_on_batch` and `evaluate`.

    Args:
        models: Notes which models train.

    Returns:
        A function that ends it; models that trained already stay watched.

    Example:
        >>> from halfstep.core import subscribe
        >>> unsubscribe = subscribe(lambda event, values: print(event))
        >>> end = watch(Models())
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> _ = model.fit(keras.ops.ones((2, 3)), keras.ops.ones((2, 1)), verbose=0)
        loss
        step
        update
        >>> end()
        >>> unsubscribe()
    """
    undo = list(_install(models))

    def end() -> None:
        while undo:
            undo.pop()()

    return end


def _install(models: Models) -> Iterator[Undo]:
    yield replace(keras.Model, "make_train_function", functools.partial(_make, models))
    yield replace(keras.Model, "fit", _fit)
    yield replace(keras.Model, "evaluate", _evaluate)


def _make(models: Models, original: Callable[..., Any], model: Any, *args: Any, **kw: Any) -> Any:
    result = original(model, *args, **kw)
    if not hasattr(model.train_function, "_halfstep_watched"):
        model.train_function = _watched(models, model, model.train_function)
    return result


def _watched(models: Models, model: Any, train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def step(*args: Any) -> Any:
        models.note(model)
        before = _look(model, args)
        inside.step = True
        try:
            with quiet(*_TOLD_HERE):
                result = train(*args)
        finally:
            inside.step = False
        _tell(model, before, _look(model, result))
        return result

    step._halfstep_watched = True  # type: ignore[attr-defined]
    return step


def _look(model: Any, state: Any) -> _Look:
    if keras.config.backend() == "jax":
        values, optimizers = by_state(model, _state(state)), [model.optimizer]
    else:
        values, optimizers = by_variable, list(optimizers_of(model).values())
    return sums(model, values), [(each, reading(each, values)) for each in optimizers]


def _state(values: tuple[Any, Any]) -> Any:
    """Returns the state among (state, iterator) or (logs, state)."""
    return next(each for each in values if isinstance(each, tuple))


def _tell(model: Any, before: _Look, after: _Look) -> None:
    pairs = zip(before[0], after[0], strict=False)
    known = next((each for each in starmap(_loss, pairs) if each is not None), None)
    if known is not None:
        emit("loss", value=known, source="keras")
    told = [
        tell_steps(each, earlier, later)
        for (each, earlier), (_, later) in zip(before[1], after[1], strict=True)
    ]
    if not any(told):  # another kind of optimizer trains
        _emit_steps(model, Reading(), [Step()] * model.steps_per_execution)


def _loss(before: Sum, after: Sum) -> float | None:
    """Returns the mean of what was added, None if nothing was or it cannot be told any more.

    Keras keeps nothing but sums: one that is not finite hides all that is added to it.
    """
    added = after.weight - before.weight
    if added <= 0 or not math.isfinite(before.total):
        return None
    return (after.total - before.total) / added


def tell_steps(optimizer: Any, before: Reading, after: Reading) -> int:
    """Tells about the steps that an optimizer was asked for between two readings.

    Args:
        optimizer: It.
        before: What it had come to before.
        after: What it has come to.

    Returns:
        How many steps there were.
    """
    applied = int(after.applied - before.applied)
    if after.asked is None:
        skipped = _halvings(before.scale, after.scale)
    else:
        skipped = int(after.asked - (before.asked or 0)) - applied
    steps = [Step(True, NONFINITE, before.scale)] * skipped
    steps += [Step(scale=after.scale if skipped else before.scale)] * applied
    _emit_steps(optimizer, after, steps)
    return len(steps)


def _halvings(before: float, after: float) -> int:
    """Returns how often Keras' own optimizer skipped a step: then it halves its scale."""
    if not after or not math.isfinite(before):
        return 1  # it gets no further
    return max(0, round(math.log2(before / after)))


def _emit_steps(stepped: Any, after: Reading, steps: list[Step]) -> None:
    for record in steps:
        emit("step", record=record)
    if steps:
        emit("update", scale=after.scale, scaler=id(stepped), steps=len(steps))


def _works(layer: Any) -> bool:
    """Returns whether a layer does more than hand inputs on to the layers in it."""
    inner = any(True for _ in layer._flatten_layers(include_self=False))
    return not isinstance(layer, keras.layers.InputLayer) and (
        layer._trainable_variables or not inner
    )


def _policy_of(model: Any) -> Policy:
    own = model.dtype_policy
    return global_policy() if own == keras.config.dtype_policy() else read(own).policy


def _fit(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    inside.fit = True
    try:
        return original(*args, **kwargs)
    finally:
        inside.fit = False


def _evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(model, *args, **kwargs)
    # Keras' own name for what `fit` evaluates.
    prefix = "val" if inside.fit else "evaluate"
    for name, value in model.get_metrics_result().items():
        emit("metric", name=f"{prefix}_{name}", value=float(value))
    return result
