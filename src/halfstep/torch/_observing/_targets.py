"""Which rule makes an operation run in float32."""

import glob
import re
from collections.abc import Sequence

from halfstep.core import Rule
from halfstep.errors import RuleError
from halfstep.torch._engine._families import FAMILY_OF
from halfstep.torch._engine._ops import overloads
from halfstep.torch._observing._formats import Edit
from halfstep.torch._observing._ran import Ran, Value

# Families whose members PyTorch calls by other names where they run than where rules see them.
_FAMILY_OF_WORD = {
    "matmul": "matmul",
    "conv": "convolution",
    "attention": "attention",
    "softmax": "softmax",
    "batch_norm": "normalisation",
    "group_norm": "normalisation",
    "layer_norm": "normalisation",
    "rms_norm": "normalisation",
    "lstm": "recurrent",
    "gru": "recurrent",
    "nll_loss": "loss",
}


def edit_for(ran: Ran, all_ran: Sequence[Ran]) -> Edit | None:
    """Returns a rule by which an operation runs in float32, None where no rule reaches it.

    Args:
        ran: The operation, in whichever pass.
        all_ran: All operations of the step.
    """
    forward = _ruled(ran, all_ran)
    target = None if forward is None else _target(forward)
    if forward is None or forward.way is None or forward.where is None or target is None:
        return None
    reason = f"Its numbers leave {ran.outputs[0].dtype}."
    return Edit(forward.way, Rule(target, "full", reason, _pattern(forward.where)))


def _pattern(path: str) -> str:
    """Returns a pattern for a path that has what patterns are made of, or ends in a blank.

    Example:
        >>> _pattern("layers.a[0]"), _pattern("head ")
        ('layers.a[[]0]', 'head?')
    """
    return re.sub(r"^\s|\s$", "?", glob.escape(path))


def _ruled(ran: Ran, all_ran: Sequence[Ran]) -> Ran | None:
    """Returns the operation of the way forward that a rule would be about.

    That of a cast is the next one in the same call, for which the rules have cast. On the way back
    it is what made the low numbers of which a gradient is rounded.
    """
    if ran.key.word == "cast" and ran.key.phase == "backward":
        return _maker(ran, all_ran)
    here = [each for each in all_ran if each.key.phase == "forward" and not each.entered]
    here = [each for each in here if each.key[:2] == ran.key[:2]]
    if ran.key.word != "cast":
        return next((each for each in here if each.key.word == ran.key.word), None)
    after = here[here.index(ran) + 1 :] if ran in here else []
    return next((each for each in after if each.key.word != "cast"), None)


def _maker(ran: Ran, all_ran: Sequence[Ran]) -> Ran | None:
    """Returns what made the numbers of which a cast on the way back rounds the gradient."""
    forward = [each for each in all_ran if each.key.phase == "forward" and not each.entered]
    casts = [each for each in forward if each.key[:2] == ran.key[:2] and _undoes(ran, each)]
    before = forward[: forward.index(casts[0])] if casts else []
    made = [each for each in before if each.key.word != "cast" and _is_like(ran, each.outputs)]
    return next((each for each in reversed(made) if _target(each)), None)


def _undoes(ran: Ran, cast: Ran) -> bool:
    return cast.key.word == "cast" and _is_like(ran, cast.inputs) and not cast.low


def _is_like(ran: Ran, values: Sequence[Value]) -> bool:
    rounded = ran.outputs[0]
    return any((each.dtype, each.shape) == (rounded.dtype, rounded.shape) for each in values)


def _target(forward: Ran) -> str | None:
    family = _FAMILY_OF_WORD.get(forward.key.word)
    if family:
        return family
    bare = forward.name.removeprefix("aten::").strip("_")
    return f"aten::{bare}" if f"aten::{bare}" in FAMILY_OF or _exists(f"aten::{bare}") else None


def _exists(target: str) -> bool:
    try:
        return bool(overloads(target))
    except RuleError:
        return False
