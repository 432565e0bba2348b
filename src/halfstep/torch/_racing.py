"""Operations of the kinds that a training step is made of, to be timed in each format."""

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from halfstep.core import Entry
from halfstep.torch._dtypes import COMPUTE

Forward = Callable[[list[Tensor]], list[Tensor]]

# Of each size: the shapes of what an operation reads, weights last.
_SHAPES: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    "large": {
        "matmul": ((128, 512), (512, 512)),
        "convolution": ((2, 64, 16, 16), (64, 64, 3, 3)),
        "attention": ((2, 4, 128, 64),) * 3,
        "normalisation": ((256, 512), (8, 32, 16, 16), (512,), (512,), (32,), (32,)),
    },
    "small": {
        "matmul": ((128, 64), (64, 64)),
        "convolution": ((8, 8, 16, 16), (8, 8, 3, 3)),
        "attention": ((2, 4, 64, 16),) * 3,
        "normalisation": ((128, 64), (8, 8, 16, 16), (64,), (64,), (8,), (8,)),
    },
}
# How many of these, at the end, are weights: kept in float32, and cast at each use.
_WEIGHTS = {"matmul": 1, "convolution": 1, "attention": 0, "normalisation": 4}
# Those that take what arrives, which has to be cast, there and back, if they stay in float32.
_CAST = ("attention", "normalisation")
_FULL = {f"full_{dtype}": COMPUTE[dtype] for dtype in COMPUTE if dtype != "float32"}


def calls(device: torch.device) -> Mapping[Entry, Callable[[], object]]:
    """Returns what runs each operation forward and backward, in each format.

    Args:
        device: Where.

    Example:
        >>> len(calls(torch.device("cpu")))
        32
    """
    # Of its own, so that the script's random numbers stay what they are.
    generator = torch.Generator(device).manual_seed(0)
    return {
        Entry(family, size, name): _call(family, _made(shapes, generator), dtype, name in _FULL)
        for size, families in _SHAPES.items()
        for family, shapes in families.items()
        for name, dtype in (COMPUTE | (_FULL if family in _CAST else {})).items()
    }


def _made(shapes: tuple[tuple[int, ...], ...], generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(each, device=generator.device, generator=generator) for each in shapes]


def _call(
    family: str, tensors: list[Tensor], dtype: torch.dtype, full: bool
) -> Callable[[], object]:
    first_weight = len(tensors) - _WEIGHTS[family]
    inputs = [each.to(dtype) for each in tensors[:first_weight]]
    leaves = [each.requires_grad_() for each in (*inputs, *tensors[first_weight:])]
    compute = torch.float32 if full else dtype
    return functools.partial(_run, _FORWARDS[family], leaves, compute, dtype)


def _run(
    forward: Forward, leaves: list[Tensor], compute: torch.dtype, dtype: torch.dtype
) -> object:
    outputs = [each.to(dtype) for each in forward([each.to(compute) for each in leaves])]
    return torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs])


def _product(tensors: list[Tensor]) -> list[Tensor]:
    inputs, weight = tensors
    return [functional.linear(inputs, weight)]


def _convolution(tensors: list[Tensor]) -> list[Tensor]:
    inputs, weight = tensors
    return [functional.conv2d(inputs, weight, padding=1)]


def _attention(tensors: list[Tensor]) -> list[Tensor]:
    query, key, value = tensors
    return [functional.scaled_dot_product_attention(query, key, value, is_causal=True)]


def _bound_by_memory(tensors: list[Tensor]) -> list[Tensor]:
    """Returns what normalisations make by rows and by channels, each with what follows it."""
    rows, images, weight, bias, scales, shifts = tensors
    by_rows = functional.gelu(functional.layer_norm(rows, weight.shape, weight, bias))
    by_channels = functional.batch_norm(images, None, None, scales, shifts, training=True)
    return [rows + by_rows, functional.relu(by_channels)]


_FORWARDS: dict[str, Forward] = {
    "matmul": _product,
    "convolution": _convolution,
    "attention": _attention,
    "normalisation": _bound_by_memory,
}
