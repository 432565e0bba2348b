"""How the values of one training step of a model lie against what number formats can hold."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from halfstep.core import Exponents, Range, Ranges
from halfstep.keras._diagnosing._hooks import following, undoing
from halfstep.keras._diagnosing._numbers import Numbers, all_numbers
from halfstep.keras._diagnosing._places import Place, Places
from halfstep.keras._observe import Case, backward, called
from halfstep.keras._policies import LOW
from halfstep.keras._private import Layer

_Found: TypeAlias = dict[tuple[str, str], tuple[Exponents, str]]
_WHAT_IF = "float16"


def ranges(case: Case) -> Ranges:
    """Returns the magnitudes of what each layer makes, and of the gradients that arrive at it.

    The step runs as it is, and in float32 without a loss scale.

    Args:
        case: What is run; without a loss, forward only.
    """
    wide = _seen(replace(case.computing("float32"), scale=1.0))
    rows = (
        Range(module, role, wide.get((module, role), (values, ""))[0], values, form)
        for (module, role), (values, form) in _seen(case).items()
    )
    return Ranges(tuple(rows), form=_form(case.model))


def _form(model: Any) -> str:
    low = (each.compute_dtype for each in model._flatten_layers() if each.compute_dtype in LOW)
    return next(low, _WHAT_IF)


def _seen(case: Case) -> _Found:
    found: _Found = {}
    for module, role, numbers in (*_forward(case), *_backward(case)):
        before, form = found.get((module, role), (Exponents(), numbers.dtype))
        found[module, role] = before + Exponents.of(numbers.values), form
    return found


def _forward(case: Case) -> list[tuple[str, str, Numbers]]:
    places, found = Places(), list[tuple[str, str, Numbers]]()

    def around(place: Place, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        if _is_innermost(place.layer):
            with places.paused():
                found.extend((place.path, "output", each) for each in all_numbers(outputs))
        return outputs

    with undoing(following(places, around)):
        called(case)
    return found


def _backward(case: Case) -> Iterator[tuple[str, str, Numbers]]:
    if case.loss is None:
        return
    run = backward(case)
    there = [each for each in run.arrived if _is_innermost(each.place.layer)]
    for each in there:
        if each.role != "grad_weight":
            yield each.place.path, each.role, each.numbers
    paths = _owners(there)
    for variable, numbers in run.weights:
        if id(variable) in paths:
            yield paths[id(variable)], "grad_weight", numbers


def _owners(arrived: list[Any]) -> dict[int, str]:
    """Returns the path of the layer that owns each variable."""
    return {
        id(variable): each.place.path
        for each in arrived
        for variable in each.place.layer._trainable_variables
    }


def _is_innermost(layer: Any) -> bool:
    return isinstance(layer, Layer) and not any(layer._flatten_layers(include_self=False))
