"""What there is to know of a fault besides what to write."""

from halfstep.torch._observing._ran import Ran
from halfstep.torch._observing._step import Step

# A loss, and weights, that no training has which goes well.
_LARGE_LOSS, _LARGE_WEIGHT = 1e4, 1e3
_SKIPPED = (
    "a GradScaler that has begun at this scale skips such a step and halves its scale by itself: "
    "it is a fault only if that goes on"
)
_DIVERGES = (
    "in float32 {what} {size:.3g}: if that grows from step to step, training diverges; then lower "
    "the learning rate, for no format helps"
)


def note_of(ran: Ran, in_float32: Step, remedy: str, *, tells_loss: bool = True) -> str:
    """Returns what else there is to know of a fault that float32 does not make, "" for nothing.

    Args:
        ran: The operation that made it.
        in_float32: What happened in float32.
        remedy: What to write.
        tells_loss: Whether the loss is the one that the training knows.
    """
    if ran.entered:
        return ""
    if "GradScaler(" in remedy:
        return _SKIPPED
    weight = max(map(_largest_weight, _also_in(in_float32, ran)), default=0.0)
    found = (
        ("the loss is", abs(in_float32.loss) if tells_loss else 0.0, _LARGE_LOSS),
        ("its weights reach", weight, _LARGE_WEIGHT),
    )
    large = (_DIVERGES.format(what=what, size=size) for what, size, limit in found if size >= limit)
    return next(large, "")


def _also_in(in_float32: Step, ran: Ran) -> list[Ran]:
    return [ran, *(each for each in in_float32.ran if each.key == ran.key)]


def _largest_weight(ran: Ran) -> float:
    sizes = (each.held.largest for each in ran.inputs if each.role == "weight" and each.held)
    return max((each for each in sizes if each is not None), default=0.0)
