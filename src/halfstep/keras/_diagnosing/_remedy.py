"""What to write so that a fault is gone; what can be tried has been tried."""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras

from halfstep.core import Change, Format
from halfstep.keras._diagnosing._layer_text import is_kerass, layer_text, place_text
from halfstep.keras._diagnosing._places import Place
from halfstep.keras._diagnosing._verdict import Found
from halfstep.keras._observe import Case
from halfstep.keras._policies import LOW
from halfstep.keras._private import Layer

_MOST_LAYERS = 4
_DIVIDES = ("divide", "reciprocal", "rsqrt", "log")

Look = Callable[[Case], list[Found]]


def with_remedies(found: list[Found], case: Case, look: Look) -> list[Any]:
    """Returns the faults, each with what to write.

    Args:
        found: The faults of one pass.
        case: What was run.
        look: Runs such a case and returns its faults in this pass.
    """
    tried = functools.cache(lambda: _tried(found[0], case, look))
    return [_with_changes(each.fault, _remedy(each, tried)) for each in found]


def _with_changes(fault: Any, changes: tuple[Change, ...]) -> Any:
    remedy = "\n".join(each.text for each in changes)
    return dataclasses.replace(fault, remedy=remedy, changes=changes)


def _remedy(found: Found, tried: Callable[[], tuple[Change, ...]]) -> tuple[Change, ...]:
    if found.fault.in_float32:
        return ()
    constant, epsilon = _constant(found), _epsilon(found)
    if constant:
        return (Change(constant),)
    return (*([Change(epsilon)] if epsilon else []), *tried())


def _constant(found: Found) -> str:
    """Returns what to write in place of a number that is less than the format can hold.

    Such a number masks something; a large one is a factor, in place of which no other will do.
    """
    written = found.made.written if found.made else 0.0
    if written >= -found.fault.limit:
        return ""
    # Half of what there is, so that there is room for what it is added to.
    instead = -found.fault.limit / 2
    what = f"{written:g}" if math.isfinite(written) else "a number"
    return f"{instead:g}  # in place of {what}, which {found.fault.dtype} cannot hold"


def _epsilon(found: Found) -> str:
    """Returns what to add before a division by a number that the format rounded to zero."""
    made = found.made
    if made is None or not made.zero or made.operation not in _DIVIDES:
        return ""
    least = Format.named(made.held.dtype).min_normal
    power = 10.0 ** math.ceil(math.log10(least))
    return f"epsilon = {power:g}  # smaller ones than {least:.2g} vanish in {made.held.dtype}"


def _tried(found: Found, case: Case, look: Look) -> tuple[Change, ...]:
    return (
        (_scale(case, look) if found.fault.phase == "backward" else ())
        or _float32_layers(found, case, look)
        or _bfloat16(case, look)
    )


def _scale(case: Case, look: Look) -> tuple[Change, ...]:
    """Returns the largest loss scale below that of the case without a fault."""
    low, high = -1, math.ceil(math.log2(case.scale))
    while high - low > 1:
        middle = (low + high) // 2
        fine = not look(dataclasses.replace(case, scale=2.0**middle))
        low, high = (middle, high) if fine else (low, middle)
    if low < 0:
        return ()
    use = f"halfstep.keras.LossScaleOptimizer(optimizer, initial_scale={2.0**low})"
    return (Change(use, "scaler", scale=repr(2.0**low)),)


@dataclass
class _Wide:
    """The calls whose layers are tried in float32."""

    places: list[Place] = field(default_factory=list)

    def dtype_of(self, layer: Any, own: str) -> str:
        layers = {id(each) for place in self.places for each in _together(place.layer)}
        return "float32" if id(layer) in layers and own in LOW else own

    def add(self, place: Place | None) -> bool:
        """Takes a layer into it, if there is one that is not there yet."""
        if place is None or any(place.layer is each.layer for each in self.places):
            return False
        self.places.append(place)
        return len(self.places) <= _MOST_LAYERS

    def add_inner(self, place: Place) -> None:
        """Takes the layers in a layer into it, too."""
        inner = place.layer._flatten_layers(include_self=False, recursive=False)
        for each in inner:
            self.add(Place(f"{place.path}/{each.name}", each, parent=place))

    def add_outer(self, place: Place) -> None:
        """Takes the layer around a layer into it, unless that is the model."""
        if place.parent and place.parent.parent:
            self.add(place.parent)


def _float32_layers(found: Found, case: Case, look: Look) -> tuple[Change, ...]:
    """Returns the layers that must compute in float32 so that no fault is left."""
    wide, left = _Wide(), [found]
    while left:
        place = _written_by_hand(left[0].place)
        if place is None or not wide.add(place):
            return ()
        case = dataclasses.replace(case, dtypes=wide.dtype_of)
        left = attempted(look, case, None)
        for add in (wide.add_inner, wide.add_outer):
            if left is None:
                add(place)
                left = attempted(look, case, None)
        if left is None:
            return ()
    return tuple(Change(_text(each)) for each in wide.places)


def attempted(run: Callable[[Case], Any], case: Case, otherwise: Any) -> Any:
    """Returns what a run in other dtypes returns, or something else where there is no such run."""
    try:
        return run(case)
    except Exception:  # a model that casts by hand raises what its backend raises for such a mix
        return otherwise


def _text(place: Place) -> str:
    known = is_kerass(place.layer)
    return layer_text(place.layer, "float32") if known else place_text(place, "float32")


def _together(layer: Any) -> list[Any]:
    """Returns the layers that share the dtype of one that somebody wrote."""
    return list(layer._flatten_layers()) if is_kerass(layer) else [layer]


def _written_by_hand(place: Place) -> Place | None:
    """Returns the innermost layer around a call that somebody wrote, not Keras inside of one."""
    parent = place.parent
    while parent and is_kerass(parent.layer) and not _holds_others(parent.layer):
        place, parent = parent, parent.parent
    return place if isinstance(place.layer, Layer) else None


def _holds_others(layer: Any) -> bool:
    wraps = isinstance(layer, keras.layers.Wrapper | keras.layers.Bidirectional)
    return wraps or type(layer) is keras.layers.RNN


def _bfloat16(case: Case, look: Look) -> tuple[Change, ...]:
    wider = dataclasses.replace(case, dtypes=lambda _, own: "bfloat16" if own in LOW else own)
    use = 'halfstep.keras.set_global_policy("mixed_bfloat16")'
    found = attempted(look, wider, True)
    return () if found else (Change(use, "policy", instead="mixed_bfloat16"),)
