"""What the host saw of a training loop: whether it scales the loss, and who unscales."""

import threading
import warnings
from collections.abc import Sequence
from typing import Any

from halfstep.core import LossScale, levels_to_user

_FORGOTTEN = (
    "LossScaleOptimizer takes the gradients as they are, because scale_loss was never called: to "
    "divide them would train a fraction as fast. Small gradients are lost in float16. Write loss = "
    "optimizer.scale_loss(loss) before the gradients are taken, or multiply the loss by "
    "optimizer.loss_scale."
)


class UnscaledLossWarning(UserWarning):
    """A training loop steps a loss-scale optimizer without ever scaling its loss."""


class Usage:
    """Whether the loss was ever scaled, and which gradients were unscaled by hand.

    Tracing a function counts as calling it: the host sees no more of a compiled loop.
    """

    def __init__(self) -> None:
        self._scaled = False
        self._told = False
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

    def was_forgotten(self, rule: LossScale) -> bool:
        """Returns whether nobody ever scaled the loss, and says so once."""
        if self._scaled or rule.kind == "none":
            return False
        if not self._told:
            self._told = True
            warnings.warn(UnscaledLossWarning(_FORGOTTEN), stacklevel=levels_to_user())
        return True
