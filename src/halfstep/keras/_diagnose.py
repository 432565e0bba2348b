"""Which layer of a model made the first inf or NaN, and what to write instead."""

import dataclasses
from typing import Any

import keras
import numpy as np

from halfstep.core import Diagnosis, Fault
from halfstep.errors import UsageError
from halfstep.keras._diagnosing._data import faults_in_data
from halfstep.keras._diagnosing._loss import loss_of
from halfstep.keras._diagnosing._remedy import attempted, with_remedies
from halfstep.keras._diagnosing._scales import scales_of
from halfstep.keras._diagnosing._verdict import Found, of_backward, of_forward
from halfstep.keras._observe import Case, Forward, backward, forward
from halfstep.keras._private import Layer, backend


def diagnose(
    model: Any,
    inputs: Any,
    targets: Any = None,
    loss: Any = None,
    *,
    loss_scale: float | None = None,
    training: bool | None = None,
) -> Diagnosis:
    """Returns which layer made the first inf or NaN, in which pass, and what to write instead.

    The model runs eagerly and step by step, a few times where there is a fault: as it is, in
    float32 to tell whether low precision is to blame, and with the remedies. Its variables,
    metrics, seeds and statistics stay what they are. Without targets it runs forward only.

    Args:
        model: The model or layer, under the policy that it trains with.
        inputs: One batch, as the model is called with it.
        targets: What the outputs are compared with.
        loss: A loss of Keras, its name, a function of targets and outputs, or several of them as
            for `compile`; without one, that of the compiled model.
        loss_scale: What multiplies the loss; without one, the scale of the model's optimizer, and
            where that has skipped steps, those that it had before.
        training: Whether layers run as in training; without a word they do where there are targets.

    Raises:
        UsageError: There are targets without a loss, or a loss without targets; the loss is none;
            the model is no layer; the batch is empty; the loss scale is not above zero.

    Example:
        >>> import keras, numpy
        >>> keras.config.set_dtype_policy("mixed_float16")
        >>> layers = [keras.Input((64,)), keras.layers.Dense(2, "tanh", name="sum")]
        >>> model = keras.Sequential(layers)
        >>> model.layers[0].set_weights([numpy.full((64, 2), 300.0), numpy.zeros(2)])
        >>> diagnosis = diagnose(model, numpy.full((1, 64), 4.0))
        >>> print(diagnosis)
        sum: matmul made inf in the forward pass, in float16, which ends at 65504
          its output of shape (1, 2) holds it; the largest number that went in was 300
          write:
          keras.layers.Dense(2, activation="tanh", name="sum", dtype="float32")
        >>> keras.config.set_dtype_policy("float32")
    """
    scales = scales_of(model, loss_scale)
    return diagnosed(case_of(model, inputs, targets, loss, training), scales)


def diagnosed(case: Case, scales: tuple[float, ...]) -> Diagnosis:
    """Returns what is wrong with what is run.

    Args:
        case: It.
        scales: The loss scales that are tried, in this order.
    """
    data = tuple(faults_in_data(case))
    if data or case.loss is None:
        return Diagnosis(data or tuple(_forward_faults(forward(case), case)))
    run = forward(case)
    faults, scale = _forward_faults(run, case), scales[0]
    if run.finite:
        backward_faults, scale = _backward_faults(case, scales)
        faults += backward_faults
    return Diagnosis(tuple(faults), scale)


def _forward_faults(run: Forward, case: Case) -> list[Fault]:
    def look(tried: Case) -> list[Found]:
        return of_forward(forward(tried), in_float32)

    if not run.made and run.finite:
        return []
    in_float32 = attempted(forward, case.computing("float32"), Forward((), True))
    return with_remedies(of_forward(run, in_float32), case, look)


def _backward_faults(case: Case, scales: tuple[float, ...]) -> tuple[list[Fault], float]:
    """Returns the faults at the first scale that has some, and the scale that was tried last."""

    def look(tried: Case) -> list[Found]:
        return of_backward(backward(tried), case.loss_name, tried.scale)

    cases = (dataclasses.replace(case, scale=scale) for scale in scales)
    looks = ((each, look(each)) for each in cases)
    case, found = next((pair for pair in looks if pair[1]), (case, []))
    if not found:
        return [], scales[-1]
    in_float32 = attempted(look, case.computing("float32"), [])
    modules = {each.fault.module for each in in_float32}
    told = [_told(each, each.fault.module in modules) for each in found]
    return with_remedies(told, case, look), case.scale


def _told(found: Found, in_float32: bool) -> Found:
    return dataclasses.replace(found, fault=dataclasses.replace(found.fault, in_float32=in_float32))


def case_of(model: Any, inputs: Any, targets: Any, loss: Any, training: bool | None) -> Case:
    """Returns what is to be run, or says what is wrong with it; the arguments are as above."""
    if not isinstance(model, Layer):
        raise UsageError(
            f"diagnose needs a model or layer of Keras, got {model!r}."
            " Write diagnose(model, inputs)."
        )
    inputs, targets = (keras.tree.map_structure(_tensor, each) for each in (inputs, targets))
    _refuse_empty(inputs)
    _build(model, inputs)
    compare, name = loss_of(model, inputs, targets, loss)
    training = targets is not None if training is None else training
    return Case(model, inputs, targets, compare, name, training)


def _refuse_empty(inputs: Any) -> None:
    for each in keras.tree.flatten(inputs):
        shape = tuple(getattr(each, "shape", ()))
        if shape[:1] == (0,):
            raise UsageError(
                f"diagnose needs a batch with something in it, got inputs of shape {shape}."
                " Write diagnose(model, inputs[:32]) with the inputs that went wrong."
            )


def _tensor(value: Any) -> Any:
    """Returns an array as `fit` hands it on."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        return value
    floating = value.dtype == np.float64
    return keras.ops.convert_to_tensor(value, keras.config.floatx() if floating else None)


def _build(model: Any, inputs: Any) -> None:
    if not all(each.built for each in model._flatten_layers()):
        specs = keras.tree.map_structure(_spec, inputs)
        backend.compute_output_spec(model, specs)


def _spec(value: Any) -> Any:
    if not hasattr(value, "shape"):
        return value
    return keras.KerasTensor(value.shape, backend.standardize_dtype(value.dtype))
