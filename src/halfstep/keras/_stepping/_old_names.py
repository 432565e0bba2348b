"""The names that tf.keras' loss-scale optimizer had, and which tutorials still use."""

from collections.abc import Iterable
from typing import Any

from halfstep.keras._stepping._backend import backend


class OldNames:
    """What programs written for tf.keras call on a loss-scale optimizer."""

    def get_scaled_loss(self: Any, loss: Any) -> Any:
        """Returns the loss times the scale: the name of `scale_loss` in tf.keras.

        Args:
            loss: A tensor, or a function without arguments that returns one.
        """
        return (lambda: self.scale_loss(loss())) if callable(loss) else self.scale_loss(loss)

    def get_unscaled_gradients(self: Any, grads: Iterable[Any]) -> list[Any]:
        """Returns true gradients, which the next `apply` does not divide again.

        Args:
            grads: Gradients of the scaled loss.
        """
        grads = list(grads)
        self._usage.unscaled(grads)
        return list(backend().divided(grads, self._scale()))
