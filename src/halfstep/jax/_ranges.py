"""How the values of a function and of its gradient lie against what number formats can hold."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, TypeAlias

from halfstep.core import LOW_FORMATS, Exponents, Range, Ranges, override_policy
from halfstep.jax._diagnosing._numbers import numbers
from halfstep.jax._diagnosing._place import Place
from halfstep.jax._diagnosing._programs import Program, forward, is_loss_scale, run, with_gradient
from halfstep.jax._diagnosing._run import Run
from halfstep.jax._interpret import FLOAT32
from halfstep.jax._ops import FAMILY_OF, plain_name
from halfstep.jax._private import sub_jaxprs, used

_WHAT_IF = "float16"
_ROLES = ("output", "grad_input")
_FORMS = ("float32", *LOW_FORMATS)
_At: TypeAlias = tuple[str, str]


@dataclass
class _Tally:
    """The values of a run, by where they were made.

    Args:
        name: What the function is called, for what is in no scope.
        written: The operations of the function itself, by their lines.
        found: The values by module and role.
        forms: The formats that they are in.
    """

    name: str
    written: dict[Any, list[str]]
    found: dict[_At, Exponents] = field(default_factory=dict)
    forms: dict[_At, str] = field(default_factory=dict)

    def look(self, equation: Any, here: Place, out: Sequence[Any]) -> None:
        """Counts what an operation gave; on the way back, as the gradient of another one."""
        word, line = plain_name(equation.primitive.name), equation.source_info.traceback
        words = self.written.get(line, [])
        # What scales gradients has no line in the function; what is kept for them has another name.
        is_other = (here.scale and not words) or (not here.backward and words and word not in words)
        if word not in FAMILY_OF or is_other:
            return
        of = word if word in words else next(filter(FAMILY_OF.get, words), (*words, word)[0])
        for each in out:
            self.add(f"{here.path or self.name}.{of}", _ROLES[here.backward], each)

    def add(self, module: str, role: str, array: Any) -> None:
        """Counts the numbers of an array."""
        held = numbers(array)
        if held is None or not held.is_real or held.dtype not in _FORMS:
            return
        at = module, role
        self.found[at] = self.found.get(at, Exponents()) + Exponents.of(held.values)
        if self.forms.get(at) not in LOW_FORMATS:
            self.forms[at] = held.dtype


def ranges(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    scale: float = 1.0,
    argnums: int | Sequence[int] | None = None,
) -> tuple[Ranges, int]:
    """Returns the magnitudes of what each operation of a function and of its gradient gives.

    A module is a scope, or the function, with the operation; on the way back, with the operation
    whose gradient it is. Gradients of arguments are rows of their own. What is compared with is the
    same in float32, with nothing scaled.

    Args:
        function: The function; its gradient is that of `diagnose`.
        args: What it is called with.
        kwargs: The same by name.
        scale: The loss scale, which it is called with or closes over, if it uses it.
        argnums: With regard to which arguments gradients are taken.

    Returns:
        The magnitudes, and the exponent of the scale that multiplied the gradients.
    """
    name = getattr(function, "__name__", type(function).__name__)
    program = forward(function, args, kwargs)
    with override_policy("float32"):
        wide = forward(function, args, kwargs)
    here, done = _seen(program, name, argnums)
    options = {"formats": lambda path: FLOAT32, "loss_scale": scale, "loss_rescaled": 1.0 / scale}
    there, _ = _seen(wide, name, argnums, **options)
    before = math.frexp(scale)[1] - 1 if _reads_scale(wide, scale) else 0
    power = before + next((math.frexp(each)[1] - 1 for each, _ in done.factors), 0)
    form = next((each for each in here.forms.values() if each in LOW_FORMATS), _WHAT_IF)
    found = Ranges(tuple(_rows(here, there)), form=form, entering=_entering(done, before))
    return found, power


def _seen(
    program: Program, name: str, argnums: int | Sequence[int] | None, **options: Any
) -> tuple[_Tally, Run]:
    """Returns the values of a program and of its gradient, if it has one."""
    asked = (argnums,) if isinstance(argnums, int) else argnums
    both, tally = with_gradient(program, asked) or program, _Tally(name, {})
    for line, word in _written(program.closed.jaxpr):
        tally.written.setdefault(line, []).append(word)
    done = run(both, look=tally.look, **options)
    gradients = done.results[len(done.results) - len(both.moved) :]
    for path, each in zip(both.moved, gradients, strict=True):
        tally.add(path, "grad_weight", each.array)
    return tally, done


def _written(jaxpr: Any) -> Iterator[tuple[Any, str]]:
    """Yields the operations of a program with the lines that they were written in."""
    for equation in jaxpr.eqns:
        yield equation.source_info.traceback, plain_name(equation.primitive.name)
        for inner in sub_jaxprs(equation.params):
            yield from _written(inner)


def _reads_scale(program: Program, scale: float) -> bool:
    """Returns whether a loss is computed with the loss scale."""
    closed = program.closed
    reads = used(closed.jaxpr, first_only=closed.out_avals[0].shape == ())
    held = [(each, "") for each in closed.consts]
    given = zip(program.operands, program.names, strict=True)
    return any(is_loss_scale(*pair, scale) for pair in (*held, *compress(given, reads)))


def _entering(done: Run, before: int) -> float:
    """Returns the sum of the magnitudes that enter a region, as they are without a loss scale."""
    return next((scale / factor / 2.0**before / 2.0 for factor, scale in done.factors), 0.0)


def _rows(here: _Tally, there: _Tally) -> Iterator[Range]:
    """Yields the rows of what ran in both."""
    for at, values in here.found.items():
        if at in there.found:
            yield Range(*at, there.found[at], values, here.forms[at])
