"""What the host saw of a training loop: whether it scales the loss, and who unscales."""

import threading
from collections.abc import Sequence
from typing import Any

from halfstep.core import LossScale
from halfstep.errors import UsageError


class Usage:
    """Whether the loss was ever scaled, and which gradients were unscaled by hand.

    Tracing a function counts as calling it: the host sees no more of a compiled loop.
    """

    def __init__(self) -> None:
        self._scaled = False
        self._unscaled: dict[int, list[Any]] = {}

    def scaled(self) -> None:
        """Notes that the loop multiplies its loss, or knows what to multiply it by."""
        self._scaled = True

    def unscaled(self, scaled_grads: Sequence[Any]) -> None:
        """Notes that the loop divides by itself, for the next step of this thread."""
        # Replicas of a strategy are threads.
        self._unscaled[threading.get_ident()] = [g for g in scaled_grads if g is not None]

    def are_unscaled(self, grads: Sequence[Any]) -> bool:
        """Returns whether these gradients come from `get_unscaled_gradients`, and forgets it."""
        sources = self._unscaled.pop(threading.get_ident(), None)
        if sources is None:
            return False
        # Who asked for unscaled gradients only to look at them still applies the scaled ones.
        return not any(grad is source for grad in grads for source in sources)

    def refuse_unscaled_loss(self, rule: LossScale) -> None:
        """Raises an error if nobody ever scaled the loss whose gradients arrive."""
        if self._scaled or rule.kind == "none":
            return
        raise UsageError(
            "LossScaleOptimizer.apply needs gradients of a scaled loss, got gradients although "
            f"scale_loss was never called: they would be divided by {rule.init_scale:g} without "
            "having been multiplied. Write loss = optimizer.scale_loss(loss) before the gradients "
            "are taken, or multiply the loss by optimizer.loss_scale."
        )
