"""Makes the records of steps, without waiting for a device before somebody reads them."""

from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from halfstep.torch._scaling._gradients import (
    Culprits,
    ParameterNames,
    culprits,
    fingerprint,
    gradients_of,
)
from halfstep.torch._scaling._optimizers import reference
from halfstep.torch._scaling._steps import LOSS, Lazy, StepRecord, overflow_reason

if TYPE_CHECKING:
    from halfstep.torch._scaler import GradScaler

_GONE: Culprits = (("gradients that were cleared or changed before anybody asked", "unknown"),)


def taken_record(scaler: "GradScaler") -> StepRecord:
    """Returns the record of a step that was taken."""
    return StepRecord(scale=_scale(scaler), loss_nonfinite=scaler._losses.lazily())


def skipped_record(scaler: "GradScaler", optimizer: Optimizer, reason: str = "") -> StepRecord:
    """Returns the record of a step that is known to be skipped; it may wait for the device."""
    found = culprits(optimizer, scaler._names)
    loss = scaler._losses.lazily()

    def why() -> str:
        return LOSS if callable(loss) and loss() else overflow_reason(found)

    return StepRecord(
        skipped=True,
        reason=reason or (why if loss else overflow_reason(found)),
        scale=_scale(scaler),
        nonfinite=found,
        loss_nonfinite=loss,
    )


def unknown_record(scaler: "GradScaler", optimizer: Optimizer, found: Tensor) -> StepRecord:
    """Returns the record of a step whose outcome only the device knows yet."""
    later = Later(optimizer, scaler._names, found, scaler._losses.lazily())
    return StepRecord(
        skipped=later.skipped,
        reason=later.reason,
        scale=_scale(scaler),
        nonfinite=later.nonfinite,
        loss_nonfinite=later.loss_nonfinite,
    )


class Later:
    """Finds out what a step did when asked, if the gradients are still the same by then.

    Args:
        optimizer: Whose gradients they are.
        names: The names of its parameters.
        found: More than 0.0 if the step was skipped, on its device.
        loss_nonfinite: Whether the loss was not finite, or how to find out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        names: ParameterNames,
        found: Tensor,
        loss_nonfinite: Lazy[bool],
    ) -> None:
        self._optimizer = reference(optimizer)
        self._names = names
        self._found = found
        self._loss = loss_nonfinite
        self._seen = fingerprint(gradients_of(optimizer))

    def skipped(self) -> bool:
        """Returns whether the step was skipped."""
        return bool(self._found.item())

    def loss_nonfinite(self) -> bool:
        """Returns whether the loss was not finite."""
        return self._loss() if callable(self._loss) else self._loss

    def nonfinite(self) -> Culprits:
        """Returns name and kind of the gradients, or says that they are gone."""
        if not self.skipped():
            return ()
        optimizer = self._optimizer()
        if optimizer is None or fingerprint(gradients_of(optimizer)) != self._seen:
            return _GONE
        return culprits(optimizer, self._names)

    def reason(self) -> str:
        """Returns why the step was skipped."""
        if not self.skipped():
            return ""
        return LOSS if self.loss_nonfinite() else overflow_reason(self.nonfinite())


def _scale(scaler: "GradScaler") -> Lazy[float]:
    known = scaler._cell.known_scale()
    if known is not None:
        return known
    scale, _ = scaler._check_scale_growth_tracker("step")
    return scale.detach().clone().item
