"""From what was counted in a step to the rows that are told of it."""

import dataclasses
from collections.abc import Iterator, Sequence

from halfstep.core import FORMATS, Exponents, Observation, Observed
from halfstep.torch._observing._diagnosis import in_float32
from halfstep.torch._observing._losses import refuse_unused
from halfstep.torch._observing._ran import LOW, Ran, Value
from halfstep.torch._observing._settling import backs_off, settled
from halfstep.torch._observing._step import Case, run
from halfstep.torch._observing._trial import Counted

# Complex numbers are counted as the two numbers that each consists of.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
_BITS = {each.name: each.bits for each in FORMATS}
_KEPT = ("weight", "buffer")


def observation(case: Case) -> Observation:
    """Returns what the operations of a step read and wrote, at the scale that it settles at."""
    case = settled(case)[0] if backs_off(case) else case
    case = dataclasses.replace(case, trial=Counted(), settles=False)
    step, wide = run(case), in_float32(case)
    refuse_unused(case.caller, case.model, step.called)
    references = {each.key: each for each in wide.ran}
    found = [each for each in step.ran if each.outputs and not each.entered]
    return Observation(
        tuple(row for each in found for row in _rows(each, references.get(each.key)))
    )


def _rows(ran: Ran, wide: Ran | None) -> Iterator[Observed]:
    is_cast = ran.key.word == "cast"
    read = () if is_cast or wide is None else wide.inputs
    written = _before(ran) if is_cast else () if wide is None else wide.outputs
    for value, reference in _paired(ran.inputs, read):
        yield from _row(ran, value, _read_as(ran, value), reference)
    for value, reference in _paired(ran.outputs, written):
        yield from _row(ran, value, value.role, reference)


def _before(cast: Ran) -> tuple[Value, ...]:
    """Returns what a cast to a format of fewer bits read."""
    read, wrote = (
        next((_BITS.get(each.dtype, 0) for each in values), 0)
        for values in (cast.inputs, cast.outputs)
    )
    return cast.inputs if 0 < wrote < read else ()


def _paired(
    values: Sequence[Value], wide: Sequence[Value]
) -> Iterator[tuple[Value, Exponents | None]]:
    """Yields values, each with what it is in float32 where there is such a one."""
    for place, each in enumerate(values):
        found = wide[place] if place < len(wide) else None
        alike = found is not None and found.shape == each.shape and found.dtype not in LOW
        yield each, found.exponents if found is not None and alike else None


def _read_as(ran: Ran, value: Value) -> str:
    """Returns what a tensor is to an operation that reads it."""
    if value.role in _KEPT:
        return value.role
    backward = ran.key.phase == "backward" and value.role.startswith("grad")
    return "grad_output" if backward else "input"


def _row(ran: Ran, value: Value, role: str, reference: Exponents | None) -> Iterator[Observed]:
    if value.exponents is None:
        return
    path, call, phase, word, nth = ran.key
    yield Observed(
        module=path,
        operation=word,
        phase=phase,
        role=role,
        form=_PARTS.get(value.dtype, value.dtype),
        run=value.exponents,
        reference=reference,
        name=ran.name,
        call=call + 1,
        nth=nth,
        shape=value.shape,
        source=ran.source,
    )
