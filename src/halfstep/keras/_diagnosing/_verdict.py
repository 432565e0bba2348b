"""Which of what was noted is a fault, and where it happened."""

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
    keys = {each.key for each in in_float32.made}
    there = [each for each in run.made if not _meant(each, run, in_float32, keys)]
    fresh = [each for each in there if each.fresh]
    if not fresh and not run.finite:
        fresh = there[:1]
    return [Found(_forward_fault(each, each.key in keys), each.place, each) for each in fresh]


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
        if each.role == "grad_input" and not each.numbers.finite and came and bad(came) is None:
            operation = each.operation or _word(each.place)
            yield index, _backward_found(each.place, operation, each.role, each.numbers, came)


def _weights(run: Backward) -> Iterator[tuple[float, Found]]:
    for variable, grad in run.weights:
        if grad.finite:
            continue
        last = [i for i, each in enumerate(run.arrived) if _owns(each.place.layer, variable)]
        places = {run.arrived[index].place for index in last}
        came = [n for place in places for n in _outputs(run.arrived, place)]
        if came and bad(came) is None:
            place = run.arrived[last[-1]].place
            index = max(i for i in last if run.arrived[i].role == "grad_output")
            yield index + 0.5, _backward_found(place, _word(place), "grad_weight", grad, came)


def _between(arrived: tuple[Arrived, ...], index: int, loss_name: str, scale: float) -> Found:
    """Returns the fault of what stands between the layers: a cast, a model, or the loss."""
    here = arrived[index]
    if here.place.parent is None:
        loss = Place(loss_name, None)
        held, word = here.numbers, here.operation or "loss"
        return Found(_backward_fault(loss, word, "grad_input", held, scale), here.place)
    came = [arrived[index - 1].numbers] if index else []
    if isinstance(here.place.parent.layer, Functional | keras.Sequential):
        operation = here.operation or "cast"
        return _backward_found(here.place, operation, here.role, here.numbers, came)
    place = here.place.parent
    operation = here.operation or _word(place)
    return _backward_found(place, operation, "grad_input", here.numbers, came)


def _backward_found(
    place: Place, operation: str, role: str, held: Numbers, came: list[Numbers]
) -> Found:
    return Found(_backward_fault(place, operation, role, held, largest(came)), place)


def _backward_fault(place: Place, operation: str, role: str, held: Numbers, size: float) -> Fault:
    return Fault(place.path, operation, "backward", role, kind(held), held.dtype, held.shape, size)


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


def _word(place: Place) -> str:
    return type(place.layer).__name__.lower()
