"""How the values of one training step lie against what each format can hold."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from halfstep.core import LOW_FORMATS, Exponents, Moment, Policy, Range, Ranges, policy_words
from halfstep.errors import UsageError
from halfstep.torch._dtypes import HALF, format_of, name_of
from halfstep.torch._engine._paths import _unwrapped
from halfstep.torch._global import is_fit, policy_for
from halfstep.torch._lost import lost_updates
from halfstep.torch._masters._kept import master_of
from halfstep.torch._observing._counting import numbers_in
from halfstep.torch._observing._exponents import Tally
from halfstep.torch._observing._families import families_of
from halfstep.torch._observing._passing import ROLES, Observer, Role, named_modules
from halfstep.torch._observing._twins import LossFn, Twin, prepared_twin, run_step, twin
from halfstep.torch._regions._attach import checked_policy
from halfstep.torch._regions._forward import forward_of
from halfstep.torch._regions._tree import tensors_in

_WHAT_IF = "float16"


def ranges(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    policy: Policy | str | None = None,
    optimizer: Optimizer | None = None,
) -> Ranges:
    """Tells how the values of one training step lie against what number formats can hold.

    It runs the step twice, on copies of the model: in float32, and as it is or under a policy. The
    model, its gradients and buffers, the optimizer and all generators of random numbers stay as
    they are. What a format would lose is read from the step in float32.

    Args:
        model: The model, prepared or not.
        batch: Handed to `loss_fn`.
        loss_fn: Returns the loss of a model and a batch. It must use the model that it is given,
            and neither scale the loss nor run backward.
        policy: What to run the step under; without one it runs as the model does.
        optimizer: Tells, if given, which updates of its next step change nothing, and what an Adam
            would lose of the squares of the gradients.

    Returns:
        The values by module and role, the scales at which they fit, and what to write.

    Raises:
        UsageError: The model cannot be copied or trains nothing, or the loss is none of it.
        PolicyError: The policy cannot be read or followed.

    Example:
        >>> import torch
        >>> model, batch = torch.nn.Linear(4, 2), torch.ones(8, 4)
        >>> found = ranges(model, batch, lambda model, batch: model(batch).mean() * 2.0**-28)
        >>> found.lost(), found.lost(found.power)
        (1.0, 0.0)
        >>> print(found.window())
        2^7 to 2^44
    """
    _check(optimizer)
    wide = _seen(prepared_twin(model, "float32"), batch, loss_fn)
    chosen = _in_force(model) if policy is None else checked_policy(policy, model)
    copies = twin(model, optimizer) if chosen is None else prepared_twin(model, chosen, optimizer)
    here, in_use = _seen(copies, batch, loss_fn), chosen or _first_policy(model)
    return Ranges(
        tuple(_rows(copies[0], wide, here)),
        form=_form(chosen, copies[0], here),
        entering=wide.entering,
        moments=tuple(_moments(*copies)),
        updates=tuple(_updates(*copies)),
        policy="" if in_use is None else policy_words(in_use),
    )


def _check(optimizer: object) -> None:
    if isinstance(optimizer, LBFGS) or not isinstance(optimizer, Optimizer | None):
        raise UsageError(
            f"ranges needs an optimizer that takes one step at a time, got "
            f"{type(optimizer).__name__}. Pass the torch.optim.Optimizer that trains the model."
        )


def _in_force(model: nn.Module) -> Policy | None:
    """Returns the policy that a model is about to be prepared by, None if it stays as it is."""
    everywhere = policy_for(model)
    prepared = any(map(forward_of, model.modules()))
    as_it_is = prepared or everywhere.compute_dtype == "float32" or not is_fit(model)
    return None if as_it_is else everywhere


def _first_policy(model: nn.Module) -> Policy | None:
    """Returns the policy of the first region in a model, None without any."""
    forwards = filter(None, map(forward_of, model.modules()))
    return next((each.region.policy for each in forwards), None)


class _Seen(NamedTuple):
    """What one run shows.

    Args:
        values: The values of each role.
        formats: The names of the formats that they are in.
        entering: The sum of the magnitudes of the gradients that enter.
    """

    values: dict[Role, Exponents]
    formats: dict[Role, str]
    entering: float


def _seen(copies: Twin, batch: Any, loss_fn: LossFn) -> _Seen:
    model, tally, sizes = copies[0], Tally[int](), list[Tensor]()

    def entered(gradient: Tensor | None) -> None:
        sizes.extend(each.abs().sum() for each in numbers_in(gradient))

    def enter(_module: nn.Module, _args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(entered)

    with Observer(model, tally) as observer:
        handle = model.register_forward_hook(enter)
        run_step(model, batch, loss_fn)
        handle.remove()
    return _Seen(observer.seen.read(), observer.seen.formats, sum(float(each) for each in sizes))


def _rows(model: nn.Module, wide: _Seen, here: _Seen) -> Iterator[Range]:
    """Yields the rows, module by module, of what ran in both."""
    for path, module in named_modules(model).items():
        known_as = "" if module is _unwrapped(model) else path
        for name in ROLES:
            role = Role(path, name)
            if role in wide.values and role in here.values:
                found = wide.values[role], here.values[role], here.formats[role]
                yield Range(path, name, *found, families_of(module), known_as)


def _form(policy: Policy | None, model: nn.Module, here: _Seen) -> str:
    """Returns the name of the format that a model computes in, or might."""
    forwards = filter(None, map(forward_of, model.modules()))
    policies = [policy] if policy else [each.region.policy for each in forwards]
    dtypes = [each.compute_dtype for each in policies]
    dtypes += [name_of(each.dtype) for each in model.parameters() if each.dtype in HALF]
    # Data may be stored in another format than the one that is computed in.
    by_role = sorted(here.formats.items(), key=lambda pair: pair[0].name == "input")
    dtypes += [form for _, form in by_role if form in LOW_FORMATS]
    return next((each for each in dtypes if each != "float32"), _WHAT_IF)


def _moments(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Moment]:
    """Yields what an Adam would make of the gradients, nothing for another optimizer."""
    groups = [] if optimizer is None else optimizer.param_groups
    names = {id(each): name for name, each in model.named_parameters()}
    for group in groups:
        for each in group["params"] if {"betas", "eps"} <= group.keys() else ():
            if each.grad is not None:
                assert optimizer is not None
                form = format_of(_state_dtype(optimizer, each))
                squares = _squares(each.grad, float(group["betas"][1]))
                yield Moment(names.get(id(each), "?"), form, float(group["eps"]), squares)


def _state_dtype(optimizer: Optimizer, parameter: Tensor) -> torch.dtype:
    kept = optimizer.state.get(parameter, {}).get("exp_avg_sq")
    if isinstance(kept, Tensor):
        return kept.dtype
    return torch.float32 if master_of(parameter) is not None else parameter.dtype


def _squares(gradient: Tensor, beta: float) -> Exponents:
    """Returns what a step adds to a second moment, for a gradient that is not zero."""
    whole = gradient.detach().to_dense().resolve_conj()
    # Of a complex parameter an Adam sees both parts, each for itself.
    values = (torch.view_as_real(whole) if whole.is_complex() else whole).double()
    tally = Tally[str]()
    tally.add("squares", values[values != 0].square() * (1.0 - beta))
    return tally.read().get("squares", Exponents())


def _updates(model: nn.Module, optimizer: Optimizer | None) -> list[tuple[str, float]]:
    """Returns the fractions of the updates that change nothing, in a step of the optimizer.

    What has a master loses none of them.
    """
    if optimizer is None:
        return []
    mastered = {name for name, each in model.named_parameters() if master_of(each) is not None}
    with lost_updates(optimizer, model) as lost:
        optimizer.step()
    return [pair for pair in lost.fractions.items() if pair[0] not in mastered]
