"""Runs a model once and tells what in it made something that is not finite; nothing is kept of it.

All of it runs eagerly and in a stateless scope of Keras, so variables, seeds, statistics and
metrics stay what they were.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from halfstep.keras._diagnosing._backend import here
from halfstep.keras._diagnosing._gradients import Arrivals, Arrived, probing
from halfstep.keras._diagnosing._hooks import computing, noting
from halfstep.keras._diagnosing._notes import Made, Notes
from halfstep.keras._diagnosing._numbers import Numbers, all_numbers, bad, numbers
from halfstep.keras._diagnosing._places import Places

Dtypes = Callable[[Any, str], str]


@dataclass(frozen=True)
class Case:
    """What is run.

    Args:
        model: The model or layer.
        inputs: What it is called with.
        targets: What its outputs are compared with.
        loss: Compares them, as `loss(targets, outputs)`; None to run the model alone.
        loss_name: What the loss is called.
        training: Whether it runs as in training.
        scale: What the loss is multiplied by before its gradients are taken.
        dtypes: Which dtype a layer computes in, from the layer and its own.
    """

    model: Any
    inputs: Any
    targets: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    loss_name: str = "loss"
    training: bool = False
    scale: float = 1.0
    dtypes: Dtypes = lambda layer, own: own

    def computing(self, dtype: str) -> "Case":
        """Returns the same, with every layer computing in that dtype."""
        return replace(self, dtypes=lambda layer, own: dtype)


@dataclass(frozen=True)
class Forward:
    """What a run forward made.

    Args:
        made: What is not finite, in the order in which it was made.
        finite: Whether the outputs and the loss are.
    """

    made: tuple[Made, ...]
    finite: bool


@dataclass(frozen=True)
class Backward:
    """What arrived in a run backward.

    Args:
        arrived: The gradients of the inputs and outputs of layers, in the order of arrival.
        weights: Those of the variables, with the variables, where there is one.
    """

    arrived: tuple[Arrived, ...]
    weights: tuple[tuple[Any, Numbers], ...]


def forward(case: Case) -> Forward:
    """Runs a model forward, with its loss if it has one."""
    notes = Notes(Places())
    with _quiet(), computing(case.dtypes), noting(notes), _nothing_kept(case.model):
        results = _results(case, notes.places)
    return Forward(tuple(notes.made), bad(all_numbers(results)) is None)


def called(case: Case) -> None:
    """Calls a model, for whoever follows its layers."""
    with _quiet(), computing(case.dtypes), _nothing_kept(case.model):
        case.model(case.inputs, **_options(case))


def _quiet() -> Any:
    """Keeps NumPy from warning of the overflows that are looked for."""
    return np.errstate(over="ignore", invalid="ignore")


@contextlib.contextmanager
def _nothing_kept(model: Any, values: dict[int, Any] | None = None) -> Iterator[None]:
    """Lets a model run with other values of its variables, and write to none."""
    known = values or {}
    mapping = [(each, known.get(id(each), each)) for each in model.variables]
    layers = list(model._flatten_layers())
    losses = [(list(each._losses), set(each._loss_ids)) for each in layers]
    try:
        with keras.StatelessScope(mapping, collect_losses=True):
            yield
    finally:
        for layer, (kept, ids) in zip(layers, losses, strict=True):
            layer._losses[:] = kept
            layer._loss_ids.clear()
            layer._loss_ids.update(ids)


def _results(case: Case, places: Places) -> Any:
    outputs = case.model(case.inputs, **_options(case))
    if case.loss is None:
        return outputs
    with places.entered(None, case.loss_name) as place:
        place.inside = True
        return outputs, case.loss(case.targets, outputs)


def _options(case: Case) -> dict[str, Any]:
    accepts = getattr(case.model, "_call_has_training_arg", False)
    return {"training": case.training} if accepts else {}


def backward(case: Case) -> Backward:
    """Runs a model forward and backward."""
    arrivals = Arrivals(Places())
    variables = [each for each in case.model.trainable_variables if numbers(each) is not None]
    loss = functools.partial(_scaled_loss, case, arrivals, variables)
    with _quiet(), computing(case.dtypes), probing(arrivals), here().watching(arrivals.operation):
        grads = here().gradients(loss, [each.value for each in variables])
    pairs = zip(variables, map(numbers, grads), strict=True)
    weights = tuple((each, grad) for each, grad in pairs if grad is not None)
    return Backward(tuple(arrivals.arrived), weights)


def _scaled_loss(case: Case, arrivals: Arrivals, variables: list[Any], values: list[Any]) -> Any:
    with _nothing_kept(case.model, dict(zip(map(id, variables), values, strict=True))):
        outputs = case.model(case.inputs, **_options(case))
        assert case.loss is not None
        with arrivals.places.entered(None, case.loss_name):
            loss = case.loss(case.targets, outputs)
        arrivals.begin()
        return keras.ops.sum(loss) * case.scale
