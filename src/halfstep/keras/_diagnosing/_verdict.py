"""Which of what was noted is a fault, and where it happened."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from halfstep.core import Fault
from halfstep.keras._diagnosing._gradients import Arrived
from halfstep.keras._diagnosing._notes import Made
from halfstep.keras._diagnosing._numbers import Numbers, bad, kind, largest
from halfstep.keras._diagnosing._places import Place
from halfstep.keras._observe import Backward, Forward
from halfstep.keras._policies import LOW
from halfstep.keras._private import Functional


@dataclass(frozen=True)
class Found:
    """A fault, and what is needed to find a remedy.

    Args:
        fault: It, without a remedy.
        place: The call of the layer.
        made: What was noted of it in a run forward.
    """

    fault: Fault
    place: Place
    made: Made | None = None


def of_forward(run: Forward, in_float32: Forward) -> list[Found]:
    """Returns the faults of a run forward.

    What the same model makes in float32 and makes finite again is meant to be there, such as a
    mask of -inf.
    """
    # A model that casts by hand does so in float32, too.
    keys = {each.key for each in in_float32.made if each.held.dtype not in LOW}
    there = [each for each in run.made if not _meant(each, run, in_float32, keys)]
    fresh = [each for each in there if each.fresh]
    if not fresh and not run.finite:
        fresh = there[:1]
    once = {(each.place.path, each.operation, each.role): each for each in reversed(fresh)}
    told = [each for each in fresh if each in once.values()]
    return [Found(_forward_fault(each, each.key in keys), each.place, each) for each in told]


def _meant(made: Made, run: Forward, in_float32: Forward, keys: set[Any]) -> bool:
    return (made.key in keys and in_float32.finite) or (made.masks and run.finite)


def _forward_fault(made: Made, in_float32: bool) -> Fault:
    held = made.held
    return Fault(
        module=made.place.path,
        operation=made.operation,
        phase="forward",
        role=made.role,
        kind=made.kind,
        dtype=held.dtype,
        shape=held.shape,
        largest=made.largest,
        in_float32=in_float32,
    )


def of_backward(run: Backward, loss_name: str, scale: float) -> list[Found]:
    """Returns the faults of a run backward, in which every number forward was finite."""
    arrived = run.arrived
    first = next((index for index, each in enumerate(arrived) if not each.numbers.finite), None)
    found = [*_inputs(arrived), *_weights(run)]
    if first is not None and arrived[first].role == "grad_output":
        found.append((first, _between(arrived, first, loss_name, scale)))
    kept: list[Found] = []
    for _, each in sorted(found, key=lambda pair: pair[0]):
        if not any(_is_around(each.place, other.place) for other in kept):
            kept.append(each)
    return kept


def _inputs(arrived: tuple[Arrived, ...]) -> Iterator[tuple[float, Found]]:
    for index, each in enumerate(arrived):
        came = _outputs(arrived, each.place)
        if each.role != "grad_output" and not each.numbers.finite and came and bad(came) is None:
            yield index, _backward_found(each, _word(each), each.role, came)


def _weights(run: Backward) -> Iterator[tuple[float, Found]]:
    """Yields the variables that no function of Keras' backend was given."""
    for variable, grad in run.weights:
        arrived = list(enumerate(run.arrived))
        theirs = [pair for pair in arrived if _owns(pair[1].place.layer, variable)]
        came = [each.numbers for _, each in theirs if each.role == "grad_output"]
        if not grad.finite and came and bad(came) is None:
            place = theirs[-1][1].place
            index = max(i for i, each in arrived if _is_around(place, each.place))
            held = dataclasses.replace(grad, dtype=place.layer.compute_dtype)
            here = Arrived(place, "grad_weight", held, "")
            yield index + 0.5, _backward_found(here, _word(here), "grad_weight", came)


def _between(arrived: tuple[Arrived, ...], index: int, loss_name: str, scale: float) -> Found:
    """Returns the fault of what stands between the layers: a cast, a model, or the loss."""
    here = arrived[index]
    parent = here.place.parent
    if parent is None:
        loss = dataclasses.replace(here, place=Place(loss_name, None))
        found = _backward_found(loss, here.operation or "loss", "grad_input", [])
        last = arrived[min(index + 1, len(arrived) - 1)].place
        fault = dataclasses.replace(found.fault, largest=scale)
        return Found(fault, last)
    came = [arrived[index - 1].numbers] if index else []
    if isinstance(parent.layer, Functional | keras.Sequential):
        return _backward_found(here, here.operation or "cast", here.role, came)
    outside = dataclasses.replace(here, place=parent)
    return _backward_found(outside, _word(outside), "grad_input", came)


def _backward_found(here: Arrived, operation: str, role: str, came: list[Numbers]) -> Found:
    held, place = here.numbers, here.place
    while isinstance(place.layer, str) and place.parent:
        place = place.parent
    fault = Fault(
        module=place.path,
        operation=operation,
        phase="backward",
        role=role,
        kind=kind(held),
        dtype=held.dtype,
        shape=held.shape,
        largest=largest(came),
    )
    return Found(fault, place)


def _outputs(arrived: tuple[Arrived, ...], place: Place) -> list[Numbers]:
    return [a.numbers for a in arrived if a.place is place and a.role == "grad_output"]


def _owns(layer: Any, variable: Any) -> bool:
    return any(each is variable for each in getattr(layer, "_trainable_variables", ()))


def _is_around(outer: Place, inner: Place) -> bool:
    here: Place | None = inner
    while here is not None:
        if here is outer:
            return True
        here = here.parent
    return False


def _word(here: Arrived) -> str:
    """Returns the function that a gradient left, what made it there, or the kind of the layer."""
    layer = here.place.layer
    if isinstance(layer, str):
        return layer
    return here.operation or ("loss" if layer is None else type(layer).__name__.lower())
