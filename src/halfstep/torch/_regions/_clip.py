"""Clipping of true-valued gradients whose norm is the check of the next step, too."""

import math
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import NonFiniteError, UsageError
from halfstep.torch._once import once
from halfstep.torch._private import break_graphs
from halfstep.torch._regions._guard import Guard, guard
from halfstep.torch._regions._known import Clip
from halfstep.torch._scaling._clipping import note_clipping
from halfstep.torch._scaling._gradients import gradients_of
from halfstep.torch._scaling._one_pass import (
    checked_max_norm,
    clip_or_put_off,
    finite_norm_of,
    is_not_finite,
    tells_of_all,
)
from halfstep.torch._scaling._optimizers import divides
from halfstep.torch._scaling._released import refuse_clipped

_NAME = "Region.clip_grad_norm_()"


class Clipping:
    """The part of a region that clips."""

    _module: Callable[[], nn.Module | None]
    _optimizers: list[Callable[[], Optimizer | None]]

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the model's gradients; what it reads is not read again by the step that follows.

        Where only fused optimizers train the model, and nothing else, they clip in their step, and
        `p.grad` is not clipped before. Clip last: gradients that are written to in between, or
        added to, are an error then. `optimizer.zero_grad()` drops it.

        Args:
            max_norm: The limit of the norm, `math.inf` to measure only.
            norm_type: The p of the p-norm, `math.inf` for the largest magnitude.
            error_if_nonfinite: Whether a norm that is not finite is an error at once.

        Returns:
            The norm of all gradients before.

        Example:
            >>> import torch
            >>> from halfstep.torch import prepare
            >>> model = torch.nn.Linear(1, 1, bias=False)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> region = prepare(model, optimizer)
            >>> model(torch.ones(1, 1)).mul(8.0).backward()
            >>> region.clip_grad_norm_(2.0), model.weight.grad
            (tensor(8.), tensor([[2.0000]]))
            >>> optimizer.step()
            >>> region.last_step.grad_norm
            8.0
        """
        limit = checked_max_norm(max_norm, _NAME)
        optimizers = once(self._attached())
        for optimizer in optimizers:
            _refuse_released(guard(optimizer))
            guard(optimizer).clips.make_way(self, optimizer)
        gradients = self._gradients()
        norm = finite_norm_of(gradients, float(norm_type))
        if error_if_nonfinite:
            _refuse_nonfinite(norm)
        if limit != math.inf:
            note_clipping("clip_grad_norm_", gradients)
        kernels = _all_divide(optimizers, gradients)
        by = clip_or_put_off(norm, gradients, limit, kernels=kernels)
        found = is_not_finite(norm) if tells_of_all(norm_type) else None
        own = set(map(id, gradients))
        for optimizer in optimizers:
            theirs = [each for each in gradients_of(optimizer) if id(each) in own]
            guard(optimizer).clips.put(self, Clip(theirs, norm, found, by))
        return norm

    def _gradients(self) -> list[Tensor]:
        module = self._module()
        if module is None:
            raise UsageError(f"{_NAME} needs the model of the region, which is gone. Prepare anew.")
        refuse_clipped(_NAME, module.parameters())
        return [each.grad for each in module.parameters() if each.grad is not None]

    def _attached(self) -> Iterator[Optimizer]:
        return (each for each in (ref() for ref in self._optimizers) if each is not None)


# It looks at numbers, and leaves what it found with optimizers: neither is for a graph.
break_graphs(Clipping.clip_grad_norm_)


def _refuse_released(found: Guard) -> None:
    if any(region.releases for region in found.regions):
        raise UsageError(
            f"{_NAME} needs all gradients at once, got an optimizer of regions with release=True, "
            "which free theirs within backward. Clip without release, or leave clipping out."
        )


def _all_divide(optimizers: list[Optimizer], gradients: list[Tensor]) -> bool:
    """Returns whether each gradient is divided by exactly one kernel, and nothing else is."""
    if not all(map(divides, optimizers)):
        return False
    theirs = [id(each) for optimizer in optimizers for each in gradients_of(optimizer)]
    return sorted(theirs) == sorted(map(id, gradients))


def _refuse_nonfinite(norm: Tensor) -> None:
    if not math.isfinite(norm.item()):
        raise NonFiniteError(
            f"{_NAME} needs a finite norm, got {norm.item()}. Leave error_if_nonfinite out to let "
            "the optimizer skip the step."
        )
