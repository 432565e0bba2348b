"""Looks closely at a step of a script of JAX, whoever wrote it, by running its function again."""

import atexit
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax

from halfstep import core
from halfstep.core import Cast, Diagnosis, Ranges, emit, quiet, summed
from halfstep.jax import _autocast
from halfstep.jax._diagnose import diagnose
from halfstep.jax._inner import Turn
from halfstep.jax._ranges import ranges
from halfstep.jax._signs import Signs, finite, power_of, signs_of
from halfstep.jax._steps import Call, Steps, Undo

_EVENTS = ("loss", "nonfinite", "step", "update", "region", "metric")
_SCALER = 0
_BACKED_OFF = "the loss scale backed off"
_NOT_FINITE = "a gradient was not finite"
_RAN_UNDER = (
    "Functions made by halfstep.jax.autocast ran under {policies}; all else is in the formats that "
    "the script has written."
)
_AS_WRITTEN = (
    "No function was made by halfstep.jax.autocast, on which alone a policy acts: the script ran "
    "in its own formats."
)
_DONATED = (
    "Donated arguments were kept while the script was examined, so it needed more memory than it "
    "does by itself."
)
_UNCOUNTED = "How large the numbers of a step are could not be counted: {why}"


class Seen(NamedTuple):
    """What a look at the numbers of a step has shown.

    Args:
        ranges: Their magnitudes.
        power: The exponent of the scale that multiplied the gradients.
        casts: What was cast.
    """

    ranges: Ranges
    power: int
    casts: tuple[Cast, ...] = ()


@dataclass(frozen=True)
class Record:
    """What became of a step.

    Args:
        skipped: Whether it changed nothing.
        reason: Why not, "" if it did.
        scale: What the loss was multiplied by.
    """

    skipped: bool = False
    reason: str = ""
    scale: float = 1.0


class Looking:
    """Tells of the calls of the function that takes gradients, and keeps the present one.

    What a call has returned is read after the next one was handed to the device.

    Example:
        >>> looking = Looking()
        >>> end = looking.start()
        >>> unsubscribe = core.subscribe(lambda event, values: print(event))
        >>> step = jax.jit(jax.value_and_grad(lambda w: (w * w).sum()))
        >>> for _ in range(2):
        ...     result = step(jax.numpy.full(2, 300.0, "float16"))
        loss
        nonfinite
        step
        update
        >>> print(looking.faults(scale=1.0).first.operation)
        mul
        >>> end()
        >>> unsubscribe()
    """

    # The loss is a part of what is looked at, so nothing broken comes from elsewhere.
    whole, entered_broken, derived, sizes, only = True, False, False, None, None

    def __init__(self) -> None:
        self._steps = Steps(self._taken)
        self._waiting: tuple[Call, Signs] | None = None
        self._now: Call | None = None
        self._known: int | None = None
        self._policies: dict[str, None] = {}
        self._uncounted = ""

    def start(self) -> Undo:
        """Begins to watch, and returns what ends it."""
        undo = [self._steps.start(), core.replace(_autocast, "_run", self._note_policy)]
        atexit.register(self.flush)

        def end() -> None:
            atexit.unregister(self.flush)
            while undo:
                undo.pop()()

        return end

    def flush(self) -> None:
        """Tells of the last call, too."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            with self._steps.unseen():
                self._tell(*waiting)

    @property
    def stepped(self) -> bool:
        """Whether the script has taken a step with JAX."""
        return self._steps.seen

    @property
    def notes(self) -> Iterator[str]:
        """What there is to say of how the script ran, if it has taken a step with JAX."""
        if not self.stepped:
            return
        policies = ", ".join(self._policies)
        yield _RAN_UNDER.format(policies=policies) if policies else _AS_WRITTEN
        if self._uncounted:
            yield _UNCOUNTED.format(why=self._uncounted)
        if self._steps.donated:
            yield _DONATED

    @property
    def has_calls(self) -> bool:
        """Whether a step is there to be looked at."""
        return self._now is not None

    def expect(self, *, sampled: bool) -> None:
        """Each step is kept as it was before, whether it is to be looked at or not."""

    def forget(self) -> None:
        """The step is over."""
        self._now = None

    def faults(self, scale: float) -> Diagnosis:
        """Returns the first fault of the step, false if there is none.

        Args:
            scale: What the loss was multiplied by, which the step knows by itself.
        """
        if self._now is None:
            return Diagnosis()
        with self._steps.unseen(), quiet(*_EVENTS):
            found = self._inside(self._now) or _diagnosis(self._now)
        return replace(found, loss_scale=scale if scale != 1.0 else None)

    def _inside(self, step: Call) -> Diagnosis:
        """Returns what is wrong where gradients are taken, with forward and backward told apart."""
        try:
            (turn, *_) = self._steps.inside(step, until_broken=True)
            return Diagnosis() if turn.call is step else _in_turn(turn)
        except Exception:  # of a library whose functions only run where it has prepared for them
            return Diagnosis()

    def _counted(self, step: Call, scale: float) -> tuple[Ranges, int]:
        """Returns the magnitudes where gradients are taken, or else in the whole step."""
        try:
            counted = [_ranges(turn.call, scale) for turn in self._steps.inside(step)]
            return summed([each for each, _ in counted]), counted[-1][1]
        except Exception as error:  # of a function that is anybody's
            self._uncounted = f"{type(error).__name__}: {error}".splitlines()[0]
            return Ranges(), power_of(scale)

    def ranges(self, scale: float) -> Seen | None:
        """Returns how the numbers of the step lie in each format, None where there is none.

        Args:
            scale: What the loss was multiplied by.
        """
        if self._now is None:
            return None
        with self._steps.unseen(), quiet(*_EVENTS):
            return Seen(*self._counted(self._now, scale))

    def _taken(self, call: Call) -> None:
        if self._known is None:
            self._known = sum(not each for each in jax.device_get(finite((call.args, call.kwargs))))
        before, self._waiting = self._waiting, (call, signs_of(call))
        if before is not None:
            self._tell(*before)

    def _tell(self, call: Call, signs: Signs) -> None:
        self._now, signs = call, signs.read()
        if signs.loss is not None:
            emit("loss", value=float(signs.loss), source="jax")
        record = _record(signs)
        # Some may be so from the start, as a best loss of inf.
        if not record.skipped and signs.broken > (self._known or 0):
            self._known = signs.broken
            emit("nonfinite")
        emit("step", record=record)
        emit("update", scale=_scale(signs), scaler=_SCALER)

    def _note_policy(
        self, original: Any, program: Any, policy: Any, *args: Any, nested: bool, **kwargs: Any
    ) -> Any:
        if not nested:
            self._policies[str(policy)] = None
        return original(program, policy, *args, nested=nested, **kwargs)


def _ranges(call: Call, scale: float) -> tuple[Ranges, int]:
    given = call.given
    return ranges(given.function, call.args, call.kwargs, scale=scale, **given.options)


def _in_turn(turn: Turn) -> Diagnosis:
    """Returns what is wrong with a call, and in which turn of a loop."""
    found = _diagnosis(turn.call)
    if not turn.number:
        return found
    words = f"in turn {turn.number} of its loop"
    told = [
        replace(each, note="; ".join(filter(None, (words, each.note)))) for each in found.faults
    ]
    return replace(found, faults=tuple(told))


def _diagnosis(call: Call) -> Diagnosis:
    return diagnose(call.given.function, *call.args, **call.given.options, **call.kwargs)


def _record(signs: Signs) -> Record:
    if signs.backed_off:
        return Record(True, _BACKED_OFF, _scale(signs))
    unsound = signs.sound is not None and not signs.sound
    return Record(unsound, _NOT_FINITE if unsound else "", _scale(signs))


def _scale(signs: Signs) -> float:
    return 1.0 if signs.before is None else float(signs.before)
