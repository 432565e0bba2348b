"""One pass over gradients that tells their norm, and with it whether all of them are finite."""

import contextlib
import math
import numbers
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.errors import UsageError
from halfstep.torch._scaling._gradients import by_kind, check, stored_values, summed_values
from halfstep.torch._scaling._norms import norms_on_cpu
from halfstep.torch._scaling._steps import Lazy

# What norms of these are computed in: their own squares overflow, or lose most digits.
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
}
_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
_TINY = torch.finfo(torch.float32).tiny


def checked_max_norm(max_norm: Any, by: str) -> float:
    """Returns a limit of the norm, if it is one.

    Example:
        >>> checked_max_norm(1, "step()")
        1.0
    """
    number = isinstance(max_norm, numbers.Real) and not isinstance(max_norm, bool)
    if not number or not float(max_norm) > 0.0:
        raise UsageError(
            f"{by} needs max_norm > 0, got {max_norm!r}. Pass a number such as 1.0, or math.inf to "
            "measure without clipping."
        )
    return float(max_norm)


def norm_of(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm of gradients as one vector, in float32 or wider, without waiting for it.

    Example:
        >>> norm_of([torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float16)])
        tensor(5.)
    """
    values = [each for each in map(summed_values, gradients) if each.numel()]
    home = gradients[0].device if gradients else None
    if not values:
        return torch.zeros((), device=home)
    norms: dict[int, Tensor] = {}
    with torch.no_grad():
        for group in by_kind(values).values():
            norms.update(zip(map(id, group), _norms_of(group, norm_type), strict=True))
        # In the order of the gradients, in which mixed dtypes have the norm that one dtype has.
        together = torch.stack([norms[id(each)].to(home) for each in values])
        return torch.linalg.vector_norm(together, norm_type)


def _norms_of(values: list[Tensor], norm_type: float) -> Iterable[Tensor]:
    """Returns the norms of tensors of one kind, in half precision those of them as float32."""
    first = values[0]
    if first.dtype in (torch.float32, torch.bfloat16) and norm_type == 2.0 and first.is_cpu:
        return norms_on_cpu(values)
    return torch._foreach_norm(values, norm_type, _WIDER.get(first.dtype))


def finite_norm_of(gradients: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """Returns the norm, which on a CPU is finite wherever all gradients are."""
    norm = norm_of(gradients, norm_type)
    if not norm.is_cpu or math.isfinite(norm.item()) or not gradients:
        return norm
    if any(found.item() for found in check(gradients, norm.device).values()):
        return norm
    # Only a sum overflowed: of powers, or in float32.
    values = [each.to(norm.device) for each in map(summed_values, gradients) if each.numel()]
    largest = max(each.abs().max().item() for each in values)
    wide = [torch.complex128 if each.is_complex() else torch.float64 for each in values]
    with torch.no_grad():
        parts = [each.to(kind).div_(largest) for each, kind in zip(values, wide, strict=True)]
        return norm_of(parts, norm_type) * largest


def tells_of_all(norm_type: float) -> bool:
    """Returns whether a norm is finite only where every entry is."""
    return norm_type >= 1.0


def is_not_finite(norm: Tensor) -> Tensor:
    """Returns 1.0 where a norm is not finite, else 0.0, as a float32 tensor."""
    return (~norm.isfinite()).to(torch.float32)


def coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Returns what gradients are multiplied by to be clipped, as PyTorch computes it.

    Example:
        >>> coefficient(torch.tensor(8.0), 2.0), coefficient(torch.tensor(8.0), 10.0)
        (tensor(0.2500), tensor(1.))
    """
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def divisor(norm: Tensor, max_norm: float) -> Tensor:
    """Returns what gradients are divided by to be clipped, in float32 as fused kernels want it."""
    exceeds = ~(coefficient(norm, max_norm) >= 1.0)
    return torch.where(exceeds, (norm + 1e-6) / max_norm, 1.0).to(torch.float32)


def multiply(gradients: list[Tensor], *factors: Tensor) -> None:
    """Multiplies gradients in place by the product of float tensors without dimensions.

    On a CPU it is one pass, none if the product is 1, and two if float32 holds it inexactly.
    """
    parts: list[Any] = [math.prod(factors[1:], start=factors[0])]
    if parts[0].is_cpu:
        product = math.prod(each.item() for each in factors)
        parts = [] if product == 1.0 else [product]
        if 0.0 < product < _TINY:
            parts = [math.sqrt(product)] * 2
    with torch.no_grad():
        for group in by_kind(gradients).values():
            values, device = [*map(stored_values, group)], group[0].device
            for part in parts:
                here = part.to(device) if isinstance(part, Tensor) else part
                torch._foreach_mul_(values, here)


def clip(gradients: list[Tensor], max_norm: float, *, skipped: bool = False) -> Tensor:
    """Clips gradients in place, and returns their norm before.

    Args:
        gradients: The gradients; on a CPU those that are not finite are left as they are.
        max_norm: The limit of their norm.
        skipped: Whether nobody steps from gradients whose norm is not finite. On an accelerator
            they are then left as they are, too, and else become what they become in PyTorch.
    """
    norm = finite_norm_of(gradients)
    clip_by(norm, gradients, max_norm, skipped=skipped)
    return norm


def clip_by(
    norm: Tensor, gradients: list[Tensor], max_norm: float, *, skipped: bool = False
) -> None:
    """Clips gradients in place whose norm is known, as `clip` does."""
    factor = coefficient(norm, max_norm)
    if skipped or norm.is_cpu:
        factor = torch.where(norm.isfinite(), factor, 1.0)
    multiply(gradients, factor)


def clip_or_put_off(
    norm: Tensor, gradients: list[Tensor], max_norm: float, *, kernels: bool
) -> Tensor | None:
    """Clips gradients whose norm is known, or returns what kernels are to divide them by.

    Args:
        norm: Their norm.
        gradients: The gradients.
        max_norm: The limit.
        kernels: Whether the kernels of fused optimizers can do it.
    """
    by = divisor(norm, max_norm)
    if norm.is_cpu and (by.item() == 1.0 or not math.isfinite(norm.item())):
        return None
    if kernels and fits_kernels(gradients) and not (by.is_cpu and math.isinf(by.item())):
        return by
    clip_by(norm, gradients, max_norm)
    return None


def lazily(norm: Tensor) -> Lazy[float | None]:
    """Returns a norm as a number, or what will tell it where only a device knows."""
    return norm.item() if norm.is_cpu else norm.item


def fits_kernels(gradients: list[Tensor]) -> bool:
    """Returns whether fused kernels, which divide by a float32 number, clip these exactly."""
    return all(each.dtype in _KERNELS for each in gradients)


@contextlib.contextmanager
def divided(optimizer: Any, by: Tensor | None) -> Iterator[None]:
    """Lets the kernel of a fused optimizer divide the gradients, for the time of one step."""
    if by is None:
        yield
        return
    optimizer.grad_scale = by
    try:
        yield
    finally:
        del optimizer.grad_scale
