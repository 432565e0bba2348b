"""What the clipping of regions has found out about the gradients of an optimizer."""

import contextlib
import weakref
from collections.abc import Iterator

from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._scaling._gradients import fingerprint, gradients_of
from halfstep.torch._scaling._one_pass import divided, lazily, multiply
from halfstep.torch._scaling._steps import Lazy


class Clip:
    """What clipping found out about gradients, true until somebody writes to one of them.

    The kernel of an optimizer is no such somebody, so that it ends with the step.

    Args:
        gradients: The gradients; kept, so that no other takes the place of one unseen.
        norm: The norm of the whole region.
        found: 1.0 if one may not be finite, None if the norm does not tell.
        by: What the kernel of their optimizer is to divide them by, None for nothing.
    """

    def __init__(
        self, gradients: list[Tensor], norm: Tensor, found: Tensor | None, by: Tensor | None
    ) -> None:
        self.gradients = gradients
        self.norm = norm
        self.found = found
        self.by = by
        self.seen = fingerprint(gradients)

    def holds(self) -> bool:
        """Returns whether nobody has written to the gradients since."""
        return fingerprint(self.gradients) == self.seen


class Clips:
    """What the clipping of its regions has found out about the gradients of one optimizer."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[object, Clip] = weakref.WeakKeyDictionary()
        # Of the step that is going on.
        self.norm: Lazy[float | None] = None

    def put(self, region: object, clip: Clip) -> None:
        """Remembers what clipping found out, in place of what it did before."""
        self._of[region] = clip

    def drop(self) -> None:
        """Forgets it, as the gradients are gone."""
        self._of.clear()

    def forget(self, optimizer: Optimizer) -> None:
        """Forgets it, and does at once what was put off."""
        put_off = [clip for clip in self._of.values() if clip.by is not None]
        self.drop()
        for clip in put_off:
            _refuse_changed(clip, gradients_of(optimizer))
            if clip.by is not None:
                multiply(clip.gradients, clip.by.reciprocal())

    def make_way(self, region: object, optimizer: Optimizer) -> None:
        """Forgets what a region is about to find out anew, and what was put off if it is gone."""
        now = {id(each) for each in gradients_of(optimizer)}
        for other, clip in list(self._of.items()):
            if other is region and (clip.by is None or now.isdisjoint(clip.seen[0])):
                del self._of[other]
        if any(clip.by is not None for clip in self._of.values()):
            self.forget(optimizer)

    @contextlib.contextmanager
    def step(self, optimizer: Optimizer, gradients: list[Tensor]) -> Iterator[Tensor | None]:
        """Lets an optimizer step from gradients that were clipped, and forgets it then.

        Yields:
            1.0 where one may not be finite, 0.0 where all are, None where nobody knows.
        """
        clips = list(self._of.values())
        try:
            for clip in clips:
                if clip.by is not None:
                    _refuse_changed(clip, gradients)
            valid = [clip for clip in clips if clip.holds()]
            self.norm = lazily(valid[0].norm) if len(clips) == len(valid) == 1 else None
            with divided(optimizer, next((clip.by for clip in clips if clip.by is not None), None)):
                yield _found(valid, gradients)
        finally:
            self.drop()
            self.norm = None


def _found(clips: list[Clip], gradients: list[Tensor]) -> Tensor | None:
    """Returns what clips tell about all of the gradients, if they do."""
    known = [clip for clip in clips if clip.found is not None]
    covered = {number for clip in known for number in clip.seen[0]}
    if not known or not covered.issuperset(map(id, gradients)):
        return None
    device = gradients[0].device
    founds = [clip.found.to(device) for clip in known if clip.found is not None]
    return founds[0] if len(founds) == 1 else sum(founds[1:], start=founds[0])


def _refuse_changed(clip: Clip, gradients: list[Tensor]) -> None:
    """Raises an error if gradients are not those that are still to be clipped."""
    if fingerprint(gradients) != clip.seen:
        raise UsageError(
            "Region.clip_grad_norm_() needs gradients that stay as they are until the step that "
            "clips them, got some that were written to, added to or replaced. Clip last, or call "
            "torch.nn.utils.clip_grad_norm_() instead; optimizer.zero_grad() drops the clipping."
        )
