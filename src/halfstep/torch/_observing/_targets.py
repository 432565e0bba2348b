"""Which rule makes an operation run in float32."""

from collections.abc import Sequence

from halfstep.core import Rule
from halfstep.errors import RuleError
from halfstep.torch._engine._families import FAMILY_OF
from halfstep.torch._engine._ops import overloads
from halfstep.torch._observing._ran import Ran
from halfstep.torch._observing._ways import Way

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


def rule_for(ran: Ran, all_ran: Sequence[Ran], way: Way) -> Rule | None:
    """Returns a rule by which an operation runs in float32, None where no rule reaches it.

    Args:
        ran: The operation, in whichever pass.
        all_ran: All operations of the step.
        way: How the step computes in low precision.
    """
    forward = _ruled(ran, all_ran)
    target = None if forward is None else _target(forward)
    where = way.below("" if ran.place.is_root else ran.key.path)
    if forward is None or target is None or where is None:
        return None
    dtype = ran.outputs[0].dtype
    return Rule(target, "full", f"Its numbers leave {dtype}.", where)


def _ruled(ran: Ran, all_ran: Sequence[Ran]) -> Ran | None:
    """Returns the operation of the way forward that a rule would be about.

    That of a cast is the next one in the same call, for which the rules have cast.
    """
    here = [each for each in all_ran if each.key.phase == "forward" and not each.entered]
    here = [each for each in here if each.key[:2] == ran.key[:2]]
    if ran.key.word != "cast":
        return next((each for each in here if each.key.word == ran.key.word), None)
    after = here[here.index(ran) + 1 :] if ran in here else []
    return next((each for each in after if each.key.word != "cast"), None)


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
