"""Runs a program equation by equation on values, and notes where inf and NaN are made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from jax import numpy as jnp

from halfstep.jax._diagnosing._formats import run_equation
from halfstep.jax._diagnosing._made import Made, Value, value
from halfstep.jax._diagnosing._numbers import Numbers, is_inexact, largest, numbers
from halfstep.jax._interpret import REGION
from halfstep.jax._ops import plain_name
from halfstep.jax._private import Literal, is_of_gradient, scope, source

Key: TypeAlias = tuple[str, str, str]
Handler: TypeAlias = "Callable[[Run, Any, list[Value], Place], list[Value]]"

# Who runs the equations that hold other programs, by the name of the primitive.
HANDLERS: dict[str, Handler] = {}
_WORDS = {"convert_element_type": "cast"}


@dataclass(frozen=True)
class Place:
    """Where in a program an equation stands.

    Args:
        path: The dotted path of the scopes around it.
        backward: Whether what is around it is on the way back.
        region: Whether it is in a function that `autocast` made.
        line: The line that it came from, or else what is around it.
        scale: What gradients are brought to in the region around it, 0.0 for none.
    """

    path: str = ""
    backward: bool = False
    region: bool = False
    line: str = ""
    scale: float = 0.0

    def inside(self, equation: Any) -> "Place":
        """Returns the place of what stands in an equation."""
        path = ".".join(filter(None, (self.path, scope(equation))))
        region = self.region or equation.params.get("name") == REGION
        backward = self.backward or is_of_gradient(equation)
        return Place(path, backward, region, source(equation) or self.line, self.scale)


@dataclass
class Run:
    """One run of a program, and what was noted of it.

    Args:
        formats: What takes the place of low formats in a scope, None for nothing.
        known: What a run forward made, and took back.
        mended: What is to be zero where it is not finite.
        rescaled: What the scales of regions are multiplied by.
        loss_scale: The loss scale, 0.0 where it is known by its name only.
        loss_rescaled: What that is multiplied by.
        way_back: Whether what is not known belongs to the way back.
        line: Of which line the operands of operations are kept.
        look: Who is shown what each operation gives.
        made: What is not finite, in the order in which it was made.
        hidden: What of it went into an operation that made something finite of it.
        results: What the program returned.
        operands: The operands of the operations of that line, with their names.
        factors: What gradients were multiplied by in regions, with the scales of those.
    """

    formats: Callable[[str], Any] = lambda path: None
    known: frozenset[Key] = frozenset()
    mended: frozenset[Key] = frozenset()
    rescaled: float = 1.0
    loss_scale: float = 0.0
    loss_rescaled: float = 1.0
    way_back: bool = False
    line: str = ""
    look: Callable[[Any, Place, list[Any]], None] | None = None
    made: list[Made] = field(default_factory=list)
    hidden: set[Made] = field(default_factory=set)
    results: list[Value] = field(default_factory=list)
    operands: list[tuple[str, list[Any]]] = field(default_factory=list)
    factors: list[tuple[float, float]] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether everything that the program returned is."""
        return all(each.numbers is None for each in self.results)

    @property
    def reaching(self) -> set[Made]:
        """What is in the results."""
        return {made for each in self.results for made in each.origins}

    def program(
        self, jaxpr: Any, consts: Sequence[Value], operands: Sequence[Value], place: Place
    ) -> list[Value]:
        """Returns what a program gives."""
        values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

        def read(atom: Any) -> Value:
            return _literal(atom) if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            handler = HANDLERS.get(plain_name(equation.primitive.name), Run.operation)
            results = handler(self, equation, [read(atom) for atom in equation.invars], place)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def closed(self, closed: Any, operands: Sequence[Value], place: Place) -> list[Value]:
        """Returns what a closed program gives."""
        return self.program(closed.jaxpr, list(map(value, closed.consts)), operands, place)

    def operation(self, equation: Any, operands: list[Value], place: Place) -> list[Value]:
        """Runs an equation as a whole and takes note of what it makes."""
        here = place.inside(equation)
        arrays = [each.array for each in operands]
        if self.line and here.line == self.line:
            self.operands.append((plain_name(equation.primitive.name), arrays))
        out = run_equation(equation, arrays, self.formats(here.path))
        if self.look is not None:
            self.look(equation, here, out)
        if _key(equation, here) in self.mended:
            out = [_mended(each) for each in out]
        went_in = _chosen(operands) if equation.primitive.name == "select_n" else operands
        bad = [each for each in went_in if each.numbers is not None]
        held = next((each.numbers for each in map(value, out) if each.numbers), None)
        varies, origins = any(each.varies for each in operands), frozenset[Made]()
        if held is None:
            self._hide(equation, bad)
        else:
            mask = not varies and held.only_minus_inf
            origins = self._origins(equation, operands, bad, held, here, mask=mask)
        return [value(each, origins, varies=varies) for each in out]

    def _hide(self, equation: Any, bad: list[Value]) -> None:
        if any(
            is_inexact(var.aval.dtype) for var in equation.outvars if hasattr(var.aval, "dtype")
        ):
            self.hidden.update(made for each in bad for made in each.origins)

    def _origins(
        self,
        equation: Any,
        operands: list[Value],
        bad: list[Value],
        held: Numbers,
        here: Place,
        *,
        mask: bool,
    ) -> frozenset[Made]:
        before = frozenset(made for each in bad for made in each.origins)
        new_nan = "nan" in held.kind and not any(
            "nan" in each.numbers.kind for each in bad if each.numbers
        )
        if not all(made.meant for made in before) or (before and not new_nan):
            return before
        key = _key(equation, here)
        went_in = [held for held in (numbers(each.array) for each in operands) if held]
        meant = mask or key in self.known or (bool(bad) and not new_nan)
        made = Made(
            *key[:2],
            backward=here.backward or (self.way_back and key not in self.known),
            source=key[2],
            held=held,
            largest=largest(went_in),
            region=here.region,
            scale=here.scale,
            meant=meant,
        )
        self.made.append(made)
        return frozenset((made,))


def _key(equation: Any, here: Place) -> Key:
    name = plain_name(equation.primitive.name)
    return here.path, _WORDS.get(name, name), here.line


def _literal(atom: Any) -> Value:
    dtype = getattr(atom.aval, "dtype", None)
    return value(atom.val if dtype is None else np.asarray(atom.val, dtype))


def _mended(array: Any) -> Any:
    held = numbers(array)
    return array if held is None else jnp.where(jnp.isfinite(array), array, jnp.zeros_like(array))


def _chosen(operands: list[Value]) -> list[Value]:
    """Returns those operands of a selection of whose bad numbers one was selected."""
    which, *cases = operands
    index = np.asarray(which.array).astype(int)
    return [
        each
        for number, each in enumerate(cases)
        if each.numbers and (~np.isfinite(each.numbers.values) & (index == number)).any()
    ]
