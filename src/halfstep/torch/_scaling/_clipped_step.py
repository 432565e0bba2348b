"""Steps that clip: the norm of scaled gradients is their check, and clipping unscales them."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.torch._scaling._clipping import refuse_clipped
from halfstep.torch._scaling._closure import closure_of, with_closure
from halfstep.torch._scaling._gradients import gradients_of
from halfstep.torch._scaling._iteration import State
from halfstep.torch._scaling._one_pass import (
    clip,
    clip_or_put_off,
    coefficient,
    divided,
    divisor,
    finite_norm_of,
    fits_kernels,
    is_not_finite,
    lazily,
    multiply,
    norm_of,
)
from halfstep.torch._scaling._optimizers import divides, lacks_state
from halfstep.torch._scaling._steps import Lazy
from halfstep.torch._scaling._widening import widen_gradients

if TYPE_CHECKING:
    from halfstep.torch._scaler import GradScaler


class Clipping:
    """What one step of a scaler does about the norm of its gradients; nothing without a limit.

    A norm that is not finite says nothing certain, because sums overflow before numbers do. Where
    the host knows it, gradients are then unscaled and checked as without clipping.

    Args:
        scaler: The scaler.
        optimizer: The optimizer that steps.
        state: What the scaler knows about it.
        max_norm: The limit, or None.
    """

    def __init__(
        self, scaler: "GradScaler", optimizer: Optimizer, state: State, max_norm: float | None
    ) -> None:
        self._scaler = scaler
        self._optimizer = optimizer
        self._state = state
        self._max_norm = max_norm
        self._done = max_norm is None
        scaler._norm = None

    def by_kernel(self) -> Tensor | None:
        """Measures gradients that are still scaled, for a kernel that unscales and clips them.

        Returns:
            What clipping divides by; None where the gradients are to be checked without it.
        """
        gradients = self._scaled()
        if not gradients or self._max_norm is None:
            return None
        norm = self._measured(gradients)
        by = divisor(norm, self._max_norm)
        known = norm.is_cpu or lacks_state(self._optimizer)
        if not fits_kernels(gradients) or (known and not self._is_divisible(norm, by)):
            self._scaler.unscale_(self._optimizer)
            return None
        self._note(norm, is_not_finite(norm))
        return by

    def _is_divisible(self, norm: Tensor, by: Tensor) -> bool:
        """Returns whether the kernel can do it with one float32 number; waits for the device."""
        scale, _ = self._scaler._cell.tensors()
        return math.isfinite(norm.item()) and math.isfinite(by.item() * scale.item())

    def by_multiplying(self) -> bool:
        """Unscales and clips in one multiplication; returns False if that is left to `unscale_`."""
        gradients = self._scaled()
        if not gradients or self._max_norm is None:
            return False
        norm = self._measured(gradients)
        if not math.isfinite(norm.item()):
            return False
        inverse = self._scaler._cell.inverse().to(norm.device)
        multiply(gradients, inverse, coefficient(norm, self._max_norm))
        self._note(norm, torch.zeros((), dtype=torch.float32, device=norm.device))
        self._state["stage"], self._state["bad"] = OptState.UNSCALED, False
        return True

    def of_unscaled(self) -> None:
        """Clips gradients that are unscaled already, unless the step has clipped them."""
        gradients = gradients_of(self._optimizer)
        if self._done or self._max_norm is None or not gradients:
            return
        norm = clip(gradients, self._max_norm, skipped=True)
        founds = self._state["found_inf_per_device"]
        found = is_not_finite(norm)
        if not norm.is_cpu and founds:
            found = torch.maximum(found, founds.get(norm.device, found))
            self._state["bad"] = None
            self._note(norm, found)
        self._scaler._norm, self._done = lazily(norm), True

    def _scaled(self) -> list[Tensor]:
        """Returns gradients that are still scaled, in float32 where they were float16."""
        scaler, state = self._scaler, self._state
        if self._done or state["stage"] is not OptState.READY:
            return []
        refuse_clipped(scaler._clips, gradients_of(self._optimizer))
        state["in_step"] = True
        state["widened"] += widen_gradients(self._optimizer, scaler._names)
        return gradients_of(self._optimizer)

    def _measured(self, gradients: list[Tensor]) -> Tensor:
        norm = norm_of(gradients)
        return norm * self._scaler._cell.inverse().to(norm.device)

    def _note(self, norm: Tensor, found: Tensor) -> None:
        self._state["found_inf_per_device"] |= {found.device: found}
        self._scaler._norm, self._done = lazily(norm), True


def clipped_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], max_norm: float
) -> tuple[Any, Lazy[float | None]]:
    """Clips gradients that were never scaled and steps; returns the result and their norm."""
    closure = closure_of(args, kwargs)
    if closure is None:
        gradients = gradients_of(optimizer)
        norm = finite_norm_of(gradients)
        by = clip_or_put_off(norm, gradients, max_norm, kernels=divides(optimizer))
        with divided(optimizer, by):
            return optimizer.step(*args, **kwargs), lazily(norm)
    norms: list[Tensor] = []

    def evaluate() -> Any:
        loss = closure()
        norms[:] = [clip(gradients_of(optimizer), max_norm)]
        return loss

    args, kwargs = with_closure(args, kwargs, evaluate)
    result = optimizer.step(*args, **kwargs)
    return result, lazily(norms[0]) if norms else None
