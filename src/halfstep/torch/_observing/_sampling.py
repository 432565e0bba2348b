"""Looks at some steps of a training that goes on, and leaves the others alone."""

import weakref
from collections import deque
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from halfstep.core import Reading, Sample, subscribe
from halfstep.errors import UsageError
from halfstep.torch._observing._exponents import Taken, Tally
from halfstep.torch._observing._passing import ROLES, Observer, Role, Seen, named_modules
from halfstep.torch._private import in_backward
from halfstep.torch._regions._attach import checked_module
from halfstep.torch._scaling._steps import StepRecord

_SHOWN = 1000


def watch(
    model: nn.Module, *, every: int = 100, first: int = 1, after_fault: int = 3, keep: int = _SHOWN
) -> "Watch":
    """Looks at a few steps of a training while it goes on: which powers of two its values have.

    A step is a call of the model in training mode, with the backward pass that follows it. In
    those that are looked at, values are counted on their device, by module and role, and nothing
    waits for it. In the others nothing of it runs but a counter. Inside of a region it sees the
    values that the region computes with, in their format and with their scale.

    Args:
        model: The model, prepared or not. What is inside of a compiled one cannot be seen.
        every: Look at each call of a number that this divides.
        first: Look at so many calls at the start, too.
        after_fault: Look at so many calls after a step that a region or a GradScaler of halfstep
            has skipped. On an accelerator, it is known no later than the next regular look.
        keep: How many of the latest samples are kept.

    Returns:
        What was seen so far; it ends with its block, or with `close()`.

    Raises:
        UsageError: The model is none, is compiled or watched already; a number is out of range.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with watch(model, every=2, first=0) as seen:
        ...     for _ in range(5):
        ...         model(torch.ones(4, 2)).sum().backward()
        >>> [sample.call for sample in seen.samples]
        [2, 4]
        >>> seen.samples[-1].find("Linear", "grad_output").exponents.counts
        ((0, 4),)
    """
    for name, value, least in (
        ("every", every, 1),
        ("first", first, 0),
        ("after_fault", after_fault, 0),
        ("keep", keep, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"watch needs {name} >= {least}, got {value!r}. Write a whole number.")
    return Watch(_checked(model), every, first, after_fault, keep)


def _checked(model: Any) -> nn.Module:
    if checked_module(model) is not model or model._compiled_call_impl is not None:
        raise UsageError(
            f"watch needs a model that is not compiled, got {type(model).__name__}. What happens "
            "inside of a graph cannot be seen. Watch the model without torch.compile for a while."
        )
    if model in _WATCHES:
        raise UsageError(
            f"watch needs a model that is not watched yet, got {type(model).__name__}, which is. "
            "Call close() on what watch returned first."
        )
    return model


class _Open(NamedTuple):
    """A sample that is being taken."""

    call: int
    reason: str
    observer: Observer


class _Kept(NamedTuple):
    """A sample that was taken."""

    call: int
    reason: str
    seen: Seen
    taken: Taken[int]


class Watch:
    """What `watch` has seen so far.

    Example:
        >>> from torch import nn
        >>> seen = watch(nn.Linear(2, 1))
        >>> print(seen)
        no step was looked at
    """

    def __init__(
        self, model: nn.Module, every: int, first: int, after_fault: int, keep: int
    ) -> None:
        self._model = weakref.ref(model)
        self._every, self._first, self._after_fault = every, first, after_fault
        self._paths = list(named_modules(model))
        self._tally: Tally[int] = Tally()
        self._open: _Open | None = None
        self._kept: deque[_Kept] = deque(maxlen=keep)
        self._calls = self._dense = 0
        # Of steps whose outcome only the device knows.
        self._records: deque[StepRecord] = deque(maxlen=every)
        self._handle = model.register_forward_pre_hook(_before)
        heard = weakref.WeakMethod(self._hear)
        self._end = weakref.finalize(model, subscribe(lambda *event: _pass_on(heard, *event)))
        _WATCHES[model] = self

    @property
    def calls(self) -> int:
        """How many calls of the model there were in training."""
        return self._calls

    @property
    def samples(self) -> tuple[Sample, ...]:
        """The steps that were looked at, as far as they are complete; reading waits for them."""
        self._close_sample(complete=True)
        return tuple(self._sample(each) for each in self._kept)

    def to_dict(self) -> dict[str, Any]:
        """Returns the samples as plain data."""
        return {"calls": self._calls, "samples": [each.to_dict() for each in self.samples]}

    def close(self) -> None:
        """Ends it. The samples stay; calling it again has no effect."""
        self._close_sample(complete=False)
        self._handle.remove()
        self._end()
        model = self._model()
        if model is not None and _WATCHES.get(model) is self:
            del _WATCHES[model]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __str__(self) -> str:
        samples = self.samples
        return str(samples[-1]) if samples else "no step was looked at"

    def _call(self, model: nn.Module) -> None:
        """Notes a call of the model that begins."""
        training = model.training and torch.is_grad_enabled()
        # Several calls before one backward pass are one step.
        self._close_sample(complete=training)
        if training:
            self._calls += 1
            reason = self._reason()
            if reason and self._open is None and not _is_capturing():
                observer = Observer(model, self._tally)
                self._open = _Open(self._calls, reason, observer)
                observer.__enter__()

    def _reason(self) -> str:
        """Returns why to look at a call, an empty text for not at all."""
        regular = self._calls % self._every == 0
        while regular and self._records:
            self._note(self._records.popleft().skipped)
        if self._dense:
            self._dense -= 1
            return "fault"
        return "first" if self._calls <= self._first else "every" if regular else ""

    def _close_sample(self, *, complete: bool) -> None:
        """Ends the sample that is being taken, if it has seen a backward pass or need not."""
        found = self._open
        if found is None or (complete and not found.observer.backward):
            return
        self._open = None
        found.observer.__exit__()
        for before in list(self._kept)[-1:]:
            before.taken.pack()
        seen, taken = found.observer.seen, self._tally.take()
        self._kept.append(_Kept(found.call, found.reason, seen, taken))

    def _sample(self, kept: _Kept) -> Sample:
        values, forms = kept.seen.read(kept.taken), kept.seen.formats
        roles = [Role(path, name) for path in self._paths for name in ROLES]
        readings = (Reading(*role, forms[role], values[role]) for role in roles if role in values)
        return Sample(kept.call, kept.reason, tuple(readings))

    def _hear(self, event: str, values: dict[str, Any]) -> None:
        """Takes note of a step of whatever optimizer."""
        if event != "step":
            return
        record = values["record"]
        if record.known:
            self._note(record.skipped)
        else:
            self._records.append(record)

    def _note(self, skipped: bool) -> None:
        if skipped:
            self._dense = self._after_fault


# A function, and the rest found by the module: copies and pickles of the model take nothing along.
_WATCHES: weakref.WeakKeyDictionary[nn.Module, Watch] = weakref.WeakKeyDictionary()


def _before(module: nn.Module, _args: Any) -> None:
    if torch.compiler.is_compiling() or in_backward():
        return
    found = _WATCHES.get(module)
    if found is not None:
        found._call(module)


def _pass_on(hear: Any, event: str, values: dict[str, Any]) -> None:
    method = hear()
    if method is not None:
        method(event, values)


def _is_capturing() -> bool:
    """Returns whether the work goes into a CUDA graph, where nothing may be read or copied."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
