"""Makes the records of steps, without waiting for a device before somebody reads them."""

from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from halfstep.core import Culprits, overflow_reason
from halfstep.torch._scaling._gradients import (
    ParameterNames,
    culprits,
    fingerprint,
    gradients_of,
)
from halfstep.torch._scaling._optimizers import reference
from halfstep.torch._scaling._steps import LOSS, Lazy, StepRecord

_GONE: Culprits = (("gradients that were cleared or changed before anybody asked", "unknown"),)


class Facts(NamedTuple):
    """What is known about a step besides its gradients.

    Args:
        names: The names of parameters.
        scale: The scale in the gradients of the step.
        fault: Whether it is known that no scale would have helped.
        fault_reason: What that fault is, in words.
        norm: The norm of the gradients before they were clipped.
    """

    names: ParameterNames
    scale: Lazy[float] = 1.0
    fault: Lazy[bool] = False
    fault_reason: str = LOSS
    norm: Lazy[float | None] = None


def taken_record(facts: Facts) -> StepRecord:
    """Returns the record of a step that was taken."""
    return StepRecord(scale=facts.scale, loss_nonfinite=facts.fault, grad_norm=facts.norm)


def skipped_record(facts: Facts, optimizer: Optimizer, reason: str = "") -> StepRecord:
    """Returns the record of a step that is known to be skipped; it may wait for the device."""
    found, fault = culprits(optimizer, facts.names), facts.fault

    def why() -> str:
        return facts.fault_reason if callable(fault) and fault() else overflow_reason(found)

    return StepRecord(
        skipped=True,
        reason=reason or (why if fault else overflow_reason(found)),
        scale=facts.scale,
        nonfinite=found,
        loss_nonfinite=fault,
        grad_norm=facts.norm,
    )


def unknown_record(facts: Facts, optimizer: Optimizer, found: Tensor) -> StepRecord:
    """Returns the record of a step whose outcome only the device knows yet."""
    later = Later(facts, optimizer, found)
    return StepRecord(
        skipped=later.skipped,
        reason=later.reason,
        scale=facts.scale,
        nonfinite=later.nonfinite,
        loss_nonfinite=later.fault,
        grad_norm=facts.norm,
    )


class Later:
    """Finds out what a step did when asked, if the gradients are still the same by then.

    Args:
        facts: What else is known about the step.
        optimizer: Whose gradients they are.
        found: More than 0.0 if the step was skipped, on its device.
    """

    def __init__(self, facts: Facts, optimizer: Optimizer, found: Tensor) -> None:
        self._facts = facts
        self._optimizer = reference(optimizer)
        self._found = found
        self._seen = fingerprint(gradients_of(optimizer))

    def skipped(self) -> bool:
        """Returns whether the step was skipped."""
        return bool(self._found.item())

    def fault(self) -> bool:
        """Returns whether no scale would have helped."""
        fault = self._facts.fault
        return fault() if callable(fault) else fault

    def nonfinite(self) -> Culprits:
        """Returns name and kind of the gradients, or says that they are gone."""
        if not self.skipped():
            return ()
        optimizer = self._optimizer()
        if optimizer is None or fingerprint(gradients_of(optimizer)) != self._seen:
            return _GONE
        return culprits(optimizer, self._facts.names)

    def reason(self) -> str:
        """Returns why the step was skipped."""
        if not self.skipped():
            return ""
        return self._facts.fault_reason if self.fault() else overflow_reason(self.nonfinite())
