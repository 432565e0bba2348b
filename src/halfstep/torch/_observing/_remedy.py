"""What to write so that a fault is gone; it has been tried."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep.core import Change, Format, UnmatchedRuleWarning
from halfstep.torch._autocast import autocast
from halfstep.torch._dtypes import HALF
from halfstep.torch._observing._edges import edge_of
from halfstep.torch._observing._formats import Edit, Formats
from halfstep.torch._observing._ran import LOW, Key, Ran
from halfstep.torch._observing._settling import settled
from halfstep.torch._observing._step import Case, Step, run
from halfstep.torch._observing._targets import edit_for
from halfstep.torch._observing._trial import Asked, Mended, Trial
from halfstep.torch._observing._verdict import faults, underflows
from halfstep.torch._observing._ways import Way

_CONSTANT = "instead = {instead:g}  # in place of {written:g}, which {dtype} cannot hold"
_ADDED = "mask = mask.clamp(min=torch.finfo(mask.dtype).min / 2)  # for each mask that is added"
_ROW = "scores = scores.clamp(min=torch.finfo(scores.dtype).min / 2)  # what goes into {word}"
_PARAMETERS = """\
model.float()  # in place of model.{cast}()
lower = autocast("{device}", dtype=torch.bfloat16)  # around the model and its loss"""
_CASTS = {torch.float16: "half", torch.bfloat16: "bfloat16"}
_MOST_RULES = 8
# What a scale is raised or lowered by: what classic loss scales begin with comes first.
_POWERS = (16, 12, 20, 8, 24, 4)


# A change, several, or a line of the model; what is empty is none.
_Remedy: TypeAlias = Change | tuple[Change, ...] | str | None


@dataclass(frozen=True)
class Remedies:
    """Finds remedies for a fault of a step.

    Args:
        case: What was run.
        step: What happened.
        in_float32: What happened in float32.
        way: How the operation computes in low precision.
    """

    case: Case
    step: Step
    in_float32: Step
    way: Way

    def of(self, ran: Ran, *, in_float32: bool) -> tuple[Change, ...]:
        """Returns what to change, nothing where nothing is known that helps."""
        if ran.entered:
            return ()
        anywhere: tuple[Callable[[Ran], _Remedy], ...] = (self._mask, self._safe)
        known: tuple[Callable[[Ran], _Remedy], ...] = (
            self._constant,
            self._lower_scale,
            self._ours,
            self._rules,
            self._epsilon,
            *anywhere,
            self._bfloat16,
            self._parameters,
        )
        return _first(each(ran) for each in (anywhere if in_float32 else known))

    def of_underflow(self) -> tuple[Change, ...]:
        """Returns what to change so that gradients do not become zero."""
        scales = (self._raised(power) for power in _POWERS)
        return _first(scales) or _first([self._bfloat16()])

    def _raised(self, power: int) -> Change | None:
        scaled = self._scaled(power)
        tried = self._tried(scaled)
        fine = tried is not None and next(underflows(tried, self.in_float32), None) is None
        return self.way.at_scale(self._scale_of(scaled)) if fine else None

    def _constant(self, ran: Ran) -> str:
        """Returns what to write in place of a number that the format cannot hold."""
        limit = Format.named(ran.outputs[0].dtype).max
        written = min(ran.constants, default=0.0)
        if written >= -limit:
            return ""
        # Half of what there is, so that there is room for what it is added to.
        instead = -limit / 2
        dtype = ran.outputs[0].dtype
        text = _CONSTANT.format(instead=instead, written=written, dtype=dtype)
        return text if self._helps(trial=Mended(ran.key, _replacing(written, instead))) else ""

    def _mask(self, ran: Ran) -> str:
        """Returns what to write where masks are so low that they leave no number in a row."""
        word, made = ran.key.word, ran.made
        lowest = min((each.held.low for each in ran.inputs if each.held), default=0.0)
        row = word in ("softmax", "log_softmax") and not ran.fresh
        added = made is not None and _is_sum_of_masks(ran, lowest)
        if not (row or added):
            return ""
        text = _ROW.format(word=word) if row else _ADDED
        return text if self._helps(trial=Mended(ran.key, _raised_to_half)) else ""

    def _safe(self, ran: Ran) -> str:
        """Returns how to call an operation only where it has a value and a derivative."""
        edge, word = edge_of(ran.key.word, ran.constants), ran.key.word
        if edge is None or not self._meets(ran.key, edge.met):
            return ""
        mended = Mended(ran.key, edge.kept_off(edge.instead), edge.operand)
        return edge.safe(word) if self._helps(trial=mended) else ""

    def _epsilon(self, ran: Ran) -> str:
        """Returns a small number that the format can tell from zero, or from one."""
        edge, word = edge_of(ran.key.word, ran.constants), ran.key.word
        low = next((v.dtype for each in self.step.ran for v in each.outputs if v.dtype in LOW), "")
        if edge is None or not (edge.apart and low and self._meets(ran.key, edge.met)):
            return ""
        mended = Mended(ran.key, edge.kept_apart(edge.epsilon(low)), edge.operand)
        return edge.written_apart(word, low) if self._helps(trial=mended) else ""

    def _meets(self, key: Key, asks: Callable[[tuple[Any, ...]], bool]) -> bool:
        asked = Asked(key, asks)
        run(dataclasses.replace(self.case, trial=asked))
        return asked.answer

    def _lower_scale(self, ran: Ran) -> Change | None:
        """Returns the largest loss scale, of some, at which nothing overflows on the way back."""
        scale = self.scale
        of_loss = ran.place.is_root and ran.key.word == "multiply"
        if (ran.key.phase == "forward" and not of_loss) or scale <= 1.0:
            return None
        lower = (self._scaled(-power) for power in sorted(_POWERS) if 2.0**power <= scale)
        fine = next((each for each in lower if self._tried(each) is not None), None)
        return None if fine is None else self.way.at_scale(self._scale_of(fine))

    def _scaled(self, power: int) -> Case:
        """Returns the case with another scale, the region's where there is one."""
        case, by = self.case, 2.0**power
        if self.way.region is None:
            return dataclasses.replace(case, loss_scale=case.loss_scale * by)
        return case.scaled([self.way.region], by)

    @property
    def scale(self) -> float:
        """The scale at which the step ran: of the region, or of the loss."""
        return self._scale_of(self.case)

    def _scale_of(self, case: Case) -> float:
        region = self.way.region
        return case.loss_scale if region is None else case.scale_of(region)

    def _ours(self, ran: Ran) -> Change | None:
        formats = Formats(ours=True, only=self.way)
        return self.way.as_ours() if self.way.native and self._helps(formats) else None

    def _rules(self, ran: Ran) -> tuple[Change, ...]:
        edits = self.edits(ran)
        ways = dict.fromkeys(each.way for each in edits)
        found = [way.with_rules([rule for of, rule in edits if of == way]) for way in ways]
        changes = tuple(each for each in found if each is not None)
        return changes if len(changes) == len(found) else ()

    def edits(self, ran: Ran) -> tuple[Edit, ...]:
        """Returns the rules that leave no fault, none where no rules do."""
        edits: tuple[Edit, ...] = ()
        step, current = self.step, ran
        while len(edits) < _MOST_RULES:
            edit = edit_for(current, step.ran)
            if edit is None or edit in edits:
                return ()
            edits = (*edits, edit)
            tried = self._attempt(formats=Formats(edits=edits))
            if tried is None:
                return ()
            found = self._left(tried)
            if not found:
                return edits if tried.finite else ()
            step, current = tried, found[0]
        return ()

    def _bfloat16(self, ran: Ran | None = None) -> Change | None:
        change = self.way.in_bfloat16()
        return change if change and self._helps(Formats(torch.bfloat16, only=self.way)) else None

    def _parameters(self, ran: Ran) -> Change | None:
        """Returns what takes the place of parameters in half precision, where nothing casts."""
        dtype, device = next(
            ((each.dtype, each.device.type) for each in self.case.model.parameters()), (None, "")
        )
        if dtype not in HALF or self.way != Way():
            return None
        loss_fn = autocast(device, dtype=torch.bfloat16)(self.case.loss_fn)
        wide = dataclasses.replace(self.case, loss_fn=loss_fn, formats=Formats(wide=True))
        text = _PARAMETERS.format(cast=_CASTS[dtype], device=device)
        return Change(text, "parameters") if self._tried(wide) is not None else None

    def _helps(self, formats: Formats | None = None, trial: Trial | None = None) -> bool:
        formats, trial = formats or self.case.formats, trial or self.case.trial
        return self._tried(dataclasses.replace(self.case, formats=formats, trial=trial)) is not None

    def _tried(self, case: Case) -> Step | None:
        """Returns the step of a case that has no fault left."""
        step = attempted(case)
        fine = step is not None and step.finite and not self._left(step)
        return step if fine else None

    def _attempt(self, formats: Formats) -> Step | None:
        return attempted(dataclasses.replace(self.case, formats=formats))

    def _left(self, step: Step) -> list[Ran]:
        # What a step goes on from with finite numbers is meant, whatever float32 made of it before.
        fine = dataclasses.replace(self.in_float32, loss_finite=True, gradients_finite=True)
        return faults(step, fine if step.finite else self.in_float32)


def way_of(ran: Ran, step: Step) -> Way:
    """Returns how an operation computes in low precision, or what ran before it does.

    Args:
        ran: The operation.
        step: What happened.
    """
    if ran.way is not None:
        return ran.way
    place = step.ran.index(ran) if ran in step.ran else len(step.ran)
    before = (each.way for each in reversed(step.ran[:place]) if each.way is not None)
    after = (each.way for each in step.ran[place:] if each.way is not None)
    return next(before, None) or next(after, None) or Way()


def attempted(case: Case) -> Step | None:
    """Returns the step of a case, None where it cannot run so."""
    try:
        with warnings.catch_warnings():
            # A rule that is tried may be for a module that is called by itself.
            warnings.simplefilter("ignore", UnmatchedRuleWarning)
            return settled(case)[1]
    except Exception:  # a model that casts by hand raises what PyTorch raises for such a mix
        return None


def _first(remedies: Iterable[_Remedy]) -> tuple[Change, ...]:
    """Returns the changes of the first remedy that there is."""
    found = next((each for each in remedies if each), ())
    changes = found if isinstance(found, tuple) else (found,)
    return tuple(Change(each) if isinstance(each, str) else each for each in changes if each)


def _replacing(old: float, new: float) -> Callable[[Any], Any]:
    return lambda value: new if isinstance(value, float | int) and value == old else value


def _is_sum_of_masks(ran: Ran, lowest: float) -> bool:
    value = ran.outputs[0]
    limit = Format.named(value.dtype).max
    down = value.held is not None and value.held.only_minus_inf
    return ran.key.word in ("add", "subtract") and down and lowest < -limit / 2


def _raised_to_half(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.clamp(min=torch.finfo(value.dtype).min / 2)
