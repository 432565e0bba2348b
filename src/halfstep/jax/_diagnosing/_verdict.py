"""Which of what was made is a fault."""

from collections.abc import Iterator

from halfstep.core import Fault, Format
from halfstep.jax._diagnosing._made import Made
from halfstep.jax._diagnosing._run import Key, Run


def faults(run: Run, in_float32: Run) -> list[Made]:
    """Returns the faults of a run, in the order in which they were made.

    What the same program makes in float32 and makes finite again is meant to be there, such as
    a mask of -inf; so is what a selection leaves out.

    Args:
        run: The run.
        in_float32: A run of the same program in float32.
    """
    keys = keys_of(in_float32)
    there = [each for each in run.made if not each.meant and _is_fault(each, run, in_float32, keys)]
    if not there and not run.finite:
        there = [each for each in run.made if each in run.reaching][:1]
    return list({each.key: each for each in reversed(there)}.values())[::-1]


def keys_of(in_float32: Run) -> frozenset[Key]:
    """Returns the keys of what a run in float32 made; not all of it can be run in float32."""
    there = [each for each in in_float32.made if not _is_low(each) or each.operation == "data"]
    return frozenset(each.key for each in there)


def _is_low(made: Made) -> bool:
    return made.held.dtype in ("float16", "bfloat16")


def _is_fault(made: Made, run: Run, in_float32: Run, keys: frozenset[Key]) -> bool:
    if made.key in keys:
        return not in_float32.finite and made in run.reaching
    return made in run.reaching or made in run.hidden


def told(made: Made, name: str, in_float32: Run, remedy: str) -> Fault:
    """Returns what is told of a fault.

    Args:
        made: It.
        name: What the function is called, for what is in no scope.
        in_float32: A run of the same program in float32.
        remedy: What to write.
    """
    return Fault(
        module=made.path or name,
        operation=made.operation,
        phase="backward" if made.backward else "forward",
        role=_role(made),
        kind=made.held.kind,
        dtype=made.held.dtype,
        shape=made.held.shape,
        largest=made.largest,
        in_float32=made.key in keys_of(in_float32) and not _is_lost(made),
        remedy=remedy,
        source=made.source,
        parameter=made.of,
        note="; ".join(_notes(made)),
    )


def _is_lost(made: Made) -> bool:
    """Returns whether a constant was too large before the function ran."""
    return made.held_by == "constant" and _is_low(made)


def _notes(made: Made) -> Iterator[str]:
    if made.turn:
        yield f"in {made.turn} of its loop"
    if _is_lost(made) and made.written is None:
        yield f"{made.held.dtype} ends at {_end(made):g}, and larger numbers become inf in it"


def _end(made: Made) -> float:
    return Format.named(made.held.dtype).max


def _role(made: Made) -> str:
    if made.held_by:
        return made.held_by
    return "grad_input" if made.backward else "output"
