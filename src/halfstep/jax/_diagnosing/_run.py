"""Runs a program equation by equation on values, and notes where inf and NaN are made."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from halfstep.jax._diagnosing._formats import run_equation
from halfstep.jax._diagnosing._made import Made, Value, chosen, mended, value
from halfstep.jax._diagnosing._numbers import (
    Numbers,
    any_numbers,
    is_inexact,
    is_number,
    largest,
    numbers,
)
from halfstep.jax._diagnosing._place import Place
from halfstep.jax._diagnosing._written import Written, found, is_low
from halfstep.jax._interpret import FLOAT32
from halfstep.jax._ops import BOUNDING, RESHAPING, plain_name
from halfstep.jax._private import Literal, is_ours

Key: TypeAlias = tuple[str, str, str]
Handler: TypeAlias = "Callable[[Run, Any, list[Value], Place], list[Value]]"

# Who runs the equations that hold other programs, by the name of the primitive.
HANDLERS: dict[str, Handler] = {}
_WORDS = {"convert_element_type": "cast"}
# What is still the same argument behind them.
_SAME = frozenset((*RESHAPING, "convert_element_type", "slice", "dynamic_slice", "rev"))
_FROM_BITS = "bitcast_convert_type"


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
        written: The numbers that were written in the program and that it cannot hold.
        instead: What takes the place of some of these, by their keys.
        widened: Which operations run in float32, and so does what is computed of their results.
        entered: In which scope what comes in is in float32, and so is what is computed of it.
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
    written: tuple[Written, ...] = ()
    instead: Mapping[Hashable, Any] = field(default_factory=dict)
    widened: frozenset[Key] = frozenset()
    entered: str = ""
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

        def read(atom: Any, equation: Any = None) -> Value:
            return self._literal(atom, place, equation) if _is_literal(atom) else values[atom]

        for equation in jaxpr.eqns:
            handler = HANDLERS.get(plain_name(equation.primitive.name), Run.operation)
            given = [read(atom, equation) for atom in equation.invars]
            results = handler(self, equation, given, place)
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def closed(self, closed: Any, operands: Sequence[Value], place: Place) -> list[Value]:
        """Returns what a closed program gives."""
        consts = [self.constant(each, place, anywhere=True) for each in closed.consts]
        return self.program(closed.jaxpr, consts, operands, place)

    def _literal(self, atom: Any, place: Place, equation: Any) -> Value:
        dtype = getattr(atom.aval, "dtype", None)
        if dtype is None:
            return value(atom.val)
        here = place if equation is None or not self.written else place.inside(equation)
        return self.constant(np.asarray(atom.val, dtype), here)

    def constant(self, array: Any, here: Place, name: str = "", *, anywhere: bool = False) -> Value:
        """Returns a constant, as it was written where its format cannot hold it.

        Args:
            array: The constant.
            here: Where it is used.
            name: What it is called.
            anywhere: Whether it may have been written on another line.
        """
        held = numbers(array) if self.written else None
        if held is not None:
            known = found(self.written, held.values, here.line, anywhere=anywhere)
            if known is not None:
                return self._as_written(known, held, here, name)
        return value(array, constant=True)

    def _as_written(self, known: Written, held: Numbers, here: Place, name: str = "") -> Value:
        form = self.formats(here.path)
        instead = self.instead.get(known.key, None if form is None else known.numbers)
        if instead is None:
            return value(held.values, self._lost(known, held, here, name), written=known)
        dtype = getattr(instead, "dtype", held.values.dtype) if form is None else form
        cast = np.broadcast_to(np.asarray(instead, dtype), held.shape)
        return value(cast, wide=form is None and dtype == FLOAT32, written=known)

    def _cast(self, equation: Any, operands: list[Value], here: Place) -> Value | None:
        """Returns a number that stands in the program in its format, if that cannot hold it."""
        (operand,) = operands
        if not operand.constant or here.backward or not is_number(operand.array):
            return None
        known = Written(np.asarray(operand.array, np.float64), here.line, here.line)
        with np.errstate(all="ignore"):
            held = numbers(np.asarray(operand.array).astype(equation.params["new_dtype"]))
        lost = held is not None and is_low(held.values) and known.becomes(held.values)
        return self._as_written(known, held, here, operand.name) if held and lost else None

    def _lost(self, known: Written, held: Numbers, here: Place, name: str) -> frozenset[Made]:
        """Takes note of a number that its format cannot hold, unless it has become 0."""
        if held.finite:
            return frozenset()
        made = Made(
            here.path,
            "cast",
            backward=here.backward,
            source=here.line or known.source,
            held=held,
            largest=float(np.abs(known.numbers).max()),
            region=here.region,
            meant=held.only_minus_inf,
            of=name or known.text,
            written=known,
            held_by="constant",
            turn=here.turn,
        )
        self.made.append(made)
        return frozenset((made,))

    def operation(self, equation: Any, operands: list[Value], place: Place) -> list[Value]:
        """Runs an equation as a whole and takes note of what it makes."""
        here = place.inside(equation)
        is_cast = equation.primitive.name == "convert_element_type"
        written = self._cast(equation, operands, here) if is_cast else None
        return self._operation(equation, operands, here) if written is None else [written]

    def _operation(self, equation: Any, operands: list[Value], here: Place) -> list[Value]:
        arrays = [each.array for each in operands]
        if self.line and here.line == self.line:
            self.operands.append((plain_name(equation.primitive.name), arrays))
        key, dtype = _key(equation, here), self.formats(here.path)
        wide = dtype is None and self._is_wide(key, operands)
        out = run_equation(equation, arrays, FLOAT32 if wide else dtype)
        if self.look is not None:
            self.look(equation, here, out)
        if key in self.mended:
            out = [mended(each) for each in out]
        held = next((each.numbers for each in map(value, out) if each.numbers), None)
        origins = self._origins_of(equation, operands, held, here)
        varies = any(each.varies for each in operands)
        known = {"varies": varies, "wide": wide, "maker": _maker(equation, operands, here)}
        name = operands[0].name if operands and plain_name(equation.primitive.name) in _SAME else ""
        return [value(each, origins, name=name, **known) for each in out]

    def _is_wide(self, key: Key, operands: list[Value]) -> bool:
        inside = bool(self.entered) and f"{key[0]}.".startswith(f"{self.entered}.")
        enters = inside and any(self._enters(each) for each in operands)
        return enters or key in self.widened or any(each.wide for each in operands)

    def _enters(self, each: Value) -> bool:
        """Returns whether a value comes into the scope, and was not made there or written down."""
        within = each.maker is not None and f"{each.maker[0][0]}.".startswith(f"{self.entered}.")
        return is_low(each.array) and not (within or each.constant)

    def _origins_of(
        self, equation: Any, operands: list[Value], held: Numbers | None, here: Place
    ) -> frozenset[Made]:
        """Returns where what an operation gave comes from, if it is not finite or may hide it."""
        name = equation.primitive.name
        went_in = chosen(operands) if name == "select_n" else operands
        # Bits are integers, which keep what they are the bits of.
        bad = [each for each in went_in if each.numbers or (name == _FROM_BITS and each.origins)]
        if held is None:
            self._hide(equation, bad)
            return frozenset(made for each in operands for made in each.origins)
        return self._origins(equation, operands, bad, held, here)

    def _hide(self, equation: Any, bad: list[Value]) -> None:
        bounds = plain_name(equation.primitive.name) in BOUNDING
        if any(
            is_inexact(var.aval.dtype) for var in equation.outvars if hasattr(var.aval, "dtype")
        ):
            self.hidden.update(
                made
                for each in bad
                for made in each.origins
                if not (bounds and made.held_by == "constant")
            )

    def _origins(
        self, equation: Any, operands: list[Value], bad: list[Value], held: Numbers, here: Place
    ) -> frozenset[Made]:
        before = frozenset(made for each in bad for made in each.origins)
        new_nan = "nan" in held.kind and not any(
            each.numbers is None or "nan" in each.numbers.kind for each in bad
        )
        if not all(made.meant for made in before) or (before and not new_nan):
            return before
        written = [each for each in before if each.written]
        mask = held.only_minus_inf and not any(each.varies for each in operands)
        made = (
            replace(written[0], meant=False)
            if written
            else self._made(
                equation, operands, held, here, meant=mask or (bool(bad) and not new_nan)
            )
        )
        self.made.append(made)
        return frozenset((made,))

    def _made(
        self, equation: Any, operands: list[Value], held: Numbers, here: Place, *, meant: bool
    ) -> Made:
        key, backward = _maker(equation, operands, here)
        went_in = [held for held in map(any_numbers, (each.array for each in operands)) if held]
        name = operands[0].name if operands and key[1] == "cast" else ""
        divisor = operands[1].written if key[1] == "div" else None
        return Made(
            *key[:2],
            backward=backward or (self.way_back and key not in self.known),
            source=key[2],
            held=held,
            largest=largest(went_in),
            region=here.region,
            scale=here.scale,
            meant=meant or key in self.known,
            of=name,
            held_by="input" if name else "",
            divisor=divisor,
            turn=here.turn,
        )


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def _key(equation: Any, here: Place) -> Key:
    name = plain_name(equation.primitive.name)
    return here.path, _WORDS.get(name, name), here.line


def _maker(equation: Any, operands: list[Value], here: Place) -> tuple[Key, bool]:
    """Returns what somebody else than halfstep did last, and whether on the way back."""
    before = (each.maker for each in operands if each.maker is not None)
    own = _key(equation, here), here.backward
    return next(before, own) if is_ours(equation) else own
