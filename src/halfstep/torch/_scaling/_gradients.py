"""Checks and unscales the gradients of an optimizer, and names the ones that are not finite."""

import cmath
import reprlib
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from halfstep.core import Culprits
from halfstep.errors import UsageError
from halfstep.torch._observing._named import Names, below

Found = dict[torch.device, Tensor]
Kind = tuple[int, torch.dtype, torch.layout]
Kinds = dict[Kind, list[Tensor]]
_MANY = 1 << 15


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """Returns the parameters of every group."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns the gradients that are there."""
    return [
        gradient
        for group in optimizer.param_groups
        for parameter in group["params"]
        if (gradient := parameter.grad) is not None
    ]


def fingerprint(gradients: list[Tensor]) -> tuple[list[int], list[int]]:
    """Returns what differs as soon as a gradient is written to or replaced."""
    return [id(gradient) for gradient in gradients], [each._version for each in gradients]


def check(gradients: list[Tensor], device: torch.device) -> Found:
    """Returns, per device, 1.0 where a gradient is not finite, and changes none."""
    if _have_finite_sums([each for each in gradients if _is_summed(each)]):
        gradients = [each for each in gradients if not _is_summed(each)]
    try:
        return _checked(gradients, device) or {device: torch.zeros((), device=device)}
    except RuntimeError:
        # The kernel writes to what it checks, and nothing writes where numbers share memory.
        return _checked([_without_repeats(each) for each in gradients], device)


def _checked(gradients: list[Tensor], device: torch.device) -> Found:
    one = torch.ones((), dtype=torch.float32, device=device)
    return unscale(by_kind(gradients), one, torch.zeros_like(one), again=False)


def _is_summed(gradient: Tensor) -> bool:
    """Returns whether a sum, which only reads, is quicker than the kernel, which writes, too."""
    is_plain = type(gradient) is Tensor and gradient.layout is torch.strided
    return is_plain and gradient.is_cpu and gradient.numel() >= _MANY


@torch.no_grad()
def _have_finite_sums(gradients: list[Tensor]) -> bool:
    """Returns whether gradients add up to finite numbers, as with an inf or NaN they cannot.

    Example:
        >>> _have_finite_sums([torch.ones(2)]), _have_finite_sums([torch.tensor([1.0, torch.inf])])
        (True, False)
        >>> _have_finite_sums([torch.tensor([3e38, 3e38])])  # finite, but to be looked at closely
        False
    """
    return all(cmath.isfinite(each.sum().item()) for each in gradients)


def _without_repeats(gradient: Tensor) -> Tensor:
    """Returns a view of a gradient in which a number that `expand` repeats is there once.

    Example:
        >>> _without_repeats(torch.ones(3, 1).expand(3, 4)).shape
        torch.Size([3, 1])
    """
    if gradient.layout is not torch.strided:
        return gradient.clone()
    return gradient[tuple(slice(None if stride else 1) for stride in gradient.stride())]


def unscale(kinds: Kinds, inverse: Tensor, found: Tensor, *, again: bool) -> Found:
    """Multiplies gradients in place and returns, per device, 1.0 where one is not finite.

    Args:
        kinds: The gradients, by device, dtype and layout.
        inverse: What they are multiplied by, a float32 tensor without dimensions.
        found: A float32 tensor with the value 0.0, used for its own device.
        again: Whether the product may overflow and needs a check of its own.
    """
    inverses, founds = {inverse.device: inverse}, {found.device: found}
    checked: Found = {}
    with torch.no_grad():
        for (_, _, layout), group in kinds.items():
            device = group[0].device
            if device not in founds:
                inverses[device] = inverse.to(device, non_blocking=True)
                founds[device] = torch.zeros((), dtype=torch.float32, device=device)
            checked[device] = founds[device]
            values = group if layout is torch.strided else [stored_values(each) for each in group]
            _multiply_and_check(values, founds[device], inverses[device])
            if layout is torch.sparse_coo:
                _check_sums(group, founds[device])
            if again:
                _multiply_and_check(values, founds[device], torch.ones_like(inverses[device]))
    return checked


def by_kind(gradients: list[Tensor]) -> Kinds:
    """Returns gradients grouped by device, dtype and layout."""
    kinds: defaultdict[Kind, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        # The number of a device, -1 for the CPU: the device itself takes longer to hash.
        kinds[gradient.get_device(), gradient.dtype, gradient.layout].append(gradient)
    return kinds


def stored_values(gradient: Tensor) -> Tensor:
    """Returns the stored numbers of a gradient, sharing its memory."""
    if gradient.layout is torch.strided:
        return gradient
    return gradient._values() if gradient.is_sparse else gradient.values()


def summed_values(gradient: Tensor) -> Tensor:
    """Returns the numbers of a gradient, with duplicate indices added up as optimizers do it."""
    return gradient.coalesce()._values() if gradient.is_sparse else stored_values(gradient)


def _check_sums(group: list[Tensor], found: Tensor) -> None:
    """Checks duplicate indices of sparse gradients the way optimizers will use them: added up."""
    sums = [each.coalesce()._values() for each in group if not each.is_coalesced()]
    if sums:
        _multiply_and_check(sums, found, torch.ones_like(found))


def _multiply_and_check(values: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    first = values[0]
    if first.is_complex():
        values = [torch.view_as_real(v.conj() if v.is_conj() else v) for v in values]
    if first.dtype is torch.bfloat16 and not first.is_cpu:
        multiply_and_check_by_parts(values, found, inverse)
    else:
        torch._amp_foreach_non_finite_check_and_unscale_(values, found, inverse)


def multiply_and_check_by_parts(values: list[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Does what PyTorch's fused kernel does, for dtypes that it lacks on some devices."""
    values = [each for each in values if each.numel()]
    if values:
        torch._foreach_mul_(values, inverse)
        largest = torch.stack(torch._foreach_norm(values, torch.inf))
        found.copy_(torch.maximum(found, (~largest.isfinite()).any().to(found.dtype)))


class ParameterNames:
    """Names of parameters for messages, without keeping a parameter alive.

    Args:
        sources: Modules, pairs of name and parameter, or None.

    Example:
        >>> names = ParameterNames(nn.Linear(2, 2).named_parameters())
        >>> ParameterNames([("scale", 3)])
        Traceback (most recent call last):
            ...
        halfstep.errors.UsageError: named_parameters needs a module or pairs of name and \
parameter, got ('scale', 3). Pass model.named_parameters().
    """

    def __init__(self, *sources: nn.Module | Iterable[tuple[str, Tensor]] | None) -> None:
        modules = [each for each in sources if isinstance(each, nn.Module)]
        others = [each for each in sources if each is not None and not isinstance(each, nn.Module)]
        for each in others:
            _check_iterable(each)
        self._modules = [weakref.ref(each) for each in modules]
        self._pairs = [(_name(pair), TensorWeakRef(pair[1])) for each in others for pair in each]

    def __reduce__(self) -> tuple[Any, ...]:
        # The parameters belong to another object; a copy is given its own names.
        return ParameterNames, ()

    def of(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """Returns name and parameter of everything that the optimizer trains."""
        known = self._known()
        for number, group in enumerate(optimizer.param_groups):
            given = group.get("param_names", ())
            for place, parameter in enumerate(group["params"]):
                name = given[place] if place < len(given) else known.get(id(parameter))
                yield name or _place(number, place, parameter), parameter

    def _known(self) -> dict[int, str]:
        pairs = [(name, ref()) for name, ref in self._pairs]
        pairs += _named(filter(None, (ref() for ref in self._modules)))
        return {id(parameter): name for name, parameter in pairs if parameter is not None}


def _named(modules: Iterable[nn.Module]) -> list[tuple[str, Tensor]]:
    """Returns parameters by name, with that of the module in front where a name is not enough."""
    names, found = Names(), [(each, [*each.named_parameters()]) for each in modules]
    paths = [path for _, pairs in found for path, _ in pairs]
    if len({*paths}) == len(paths):
        return [pair for _, pairs in found for pair in pairs]
    return [(below(names.of(it), path), each) for it, pairs in found for path, each in pairs]


def _check_iterable(source: Any) -> None:
    if isinstance(source, str | Mapping | Tensor) or not isinstance(source, Iterable):
        raise _no_pairs(source)


def _name(pair: Any) -> str:
    match pair:
        case (str(name), Tensor()):
            return name
    raise _no_pairs(pair)


def _no_pairs(given: Any) -> UsageError:
    is_large = isinstance(given, Tensor | Mapping)
    shown = f"a {type(given).__name__}" if is_large else reprlib.repr(given)
    return UsageError(
        f"named_parameters needs a module or pairs of name and parameter, got {shown}. "
        "Pass model.named_parameters()."
    )


def _place(group: int, place: int, parameter: Tensor) -> str:
    return f"param_groups[{group}]['params'][{place}] of shape {tuple(parameter.shape)}"


_KINDS = {(True, False): "inf", (False, True): "nan", (True, True): "inf and nan"}


def culprits(optimizer: Optimizer, names: ParameterNames) -> Culprits:
    """Returns name and kind, "inf", "nan" or "inf and nan", of every non-finite gradient."""
    found: list[tuple[str, torch.device, int]] = []
    flags: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for name, parameter in names.of(optimizer):
        if parameter.grad is not None:
            found.append((name, parameter.grad.device, len(flags[parameter.grad.device])))
            flags[parameter.grad.device].append(_inf_and_nan(parameter.grad))
    known = {device: torch.stack(each).tolist() for device, each in flags.items()}
    kinds = ((name, _KINDS.get(tuple(known[device][row]))) for name, device, row in found)
    return tuple((name, kind) for name, kind in kinds if kind)


def _inf_and_nan(gradient: Tensor) -> Tensor:
    values = summed_values(gradient)
    return torch.stack([values.isinf().any(), values.isnan().any()])
