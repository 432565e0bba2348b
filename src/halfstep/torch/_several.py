"""What was found in the models of a step, as one."""

from dataclasses import replace

from torch import nn

from halfstep.core import Change, Diagnosis, Fault, Ranges, Rule, written
from halfstep.torch._engine._paths import _unwrapped
from halfstep.torch._observing._named import below


def named(model: nn.Module, name: str, found: Diagnosis) -> Diagnosis:
    """Returns what was found in a model with its name in front of those of its modules.

    Args:
        model: The model.
        name: What it is called.
        found: What was found, under the names that modules have in the model.
    """
    kind = type(_unwrapped(model)).__name__

    def of(fault: Fault) -> Fault:
        path = "" if fault.module == kind else fault.module
        changes = tuple(_meant(name, each) for each in fault.changes)
        remedy = written(changes) if changes else fault.remedy
        return replace(fault, module=below(name, path), remedy=remedy, changes=changes)

    return replace(found, faults=tuple(map(of, found.faults)))


def _meant(name: str, change: Change) -> Change:
    """Returns a change that says which model it is for."""
    use = change.use
    if name.isidentifier():
        use = use.replace("prepare(model,", f"prepare({name},")
    return replace(change, use=use, rules=tuple(_of_model(name, each) for each in change.rules))


def _of_model(name: str, rule: Rule) -> Rule:
    """Returns a rule whose reason says in which model the path of the rule is."""
    reason = f"{rule.reason.removesuffix('.')} in {name}."
    return replace(rule, reason=reason) if rule.where else rule


def together(found: dict[str, Ranges]) -> Ranges:
    """Returns the ranges of several models as one, their modules below the names of the models.

    Args:
        found: The ranges of each model, that of the most parameters first.
    """
    (_, first), *others = found.items()
    if not others:
        return first
    rows = [
        replace(row, module=below(name, row.where))
        for name, each in found.items()
        for row in each.rows
    ]
    return replace(first, rows=tuple(rows))


def earliest(found: list[Diagnosis]) -> Diagnosis:
    """Returns the diagnosis that is of what happened first.

    What a model was given that is not finite may be what another one made; on the way back it is
    the model that was called last that comes first.

    Args:
        found: The diagnoses of the models in the order in which they were called.
    """
    there = [(each, each.first) for each in found if each.first is not None]
    forward = [(each, fault) for each, fault in there if fault.phase == "forward"]
    made = [pair for pair in forward if not is_given(pair[1])]
    return next(iter((*made, *forward, *reversed(there))), (Diagnosis(), None))[0]


def is_given(fault: Fault) -> bool:
    """Returns whether a fault is that of what a model was called with."""
    return (fault.operation, fault.role) == ("data", "input")
