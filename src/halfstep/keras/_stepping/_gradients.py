"""From the gradients that a loop hands over to those that the inner optimizer sees."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keras import ops

from halfstep.keras._stepping._arguments import has_dtype
from halfstep.keras._stepping._backend import backend


@dataclass(frozen=True)
class Unscaling:
    """How the gradients of a step become true ones.

    Args:
        variables: The variable of each gradient.
        scale: Returns the scale, None where the gradients are true already.
        kept: Whether each gradient is the next value of its variable: that of a float8 scale, say.
        rounded: Whether the gradients of float16 variables become float16.
    """

    variables: Sequence[Any]
    scale: Callable[[], Any] | None
    kept: Sequence[bool]
    rounded: bool

    def true(self, grads: list[Any]) -> list[Any]:
        """Returns gradients without their scale; None stays None."""
        if self.scale is None:
            return grads
        free = [None if keep else grad for keep, grad in zip(self.kept, grads, strict=True)]
        quotients = backend().divided(free, self.scale())
        return [g if k else q for k, g, q in zip(self.kept, grads, quotients, strict=True)]

    def received(self, true: Sequence[Any]) -> list[tuple[Any, Any]]:
        """Returns the true gradients there are as the inner optimizer sees them.

        Returns:
            Pairs of a gradient and its variable.
        """
        pairs = [(g, v) for g, v in zip(true, self.variables, strict=True) if g is not None]
        return [(ops.cast(g, "float16") if self._rounds(v) else g, v) for g, v in pairs]

    def finite(self, grads: Sequence[Any], received: Sequence[tuple[Any, Any]]) -> Any:
        """Returns whether all that the inner optimizer sees is finite, as a tensor.

        Args:
            grads: The gradients.
            received: What `received` makes of the true ones.
        """
        undivided = None
        if self.scale is not None and self._divides_only():
            undivided = [grad for grad in grads if grad is not None], self.scale()
        return backend().all_finite([grad for grad, _ in received], undivided)

    def _divides_only(self) -> bool:
        return not any(self.kept) and not any(map(self._rounds, self.variables))

    def _rounds(self, variable: Any) -> bool:
        return self.rounded and has_dtype(variable, "float16")
