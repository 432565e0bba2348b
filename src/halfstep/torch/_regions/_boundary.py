"""The boundary of a region: gradients are multiplied on their way in and divided on the way out.

Values pass unchanged. In backward, a gradient that goes into the region is multiplied by the
scale, and one that comes out of it is divided again. A backward that is itself differentiated, as
for a gradient penalty, crosses the same boundary in the opposite direction, so each crossing is
written as the other one's derivative, to any order.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from halfstep.torch._private import accumulates, in_transform
from halfstep.torch._regions._call import Call
from halfstep.torch._regions._factor import check, product, scaled
from halfstep.torch._tracing import is_tracing

Tensors = tuple[Tensor | None, ...]


class Inward(Function):
    """Carries tensors into the region, times a factor; their gradients come out of it."""

    @staticmethod
    def forward(call: Call, factor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        return scaled(tensors, factor)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _remember(ctx, *inputs[:2], outward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensors:
        ctx.call.accumulates = _accumulates(ctx)
        factor = product(ctx.factor, ctx.call.factors()[1])
        return None, None, *_cross_some(Outward, ctx.call, factor, _widened(gradients))

    @staticmethod
    def jvp(ctx: Any, call: Any, factor: Any, *tangents: Tensor | None) -> Tensors:
        return _tangents(ctx, tangents)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _batched(Inward, dims, inputs)


class Outward(Function):
    """Carries tensors out of the region, times a factor; their gradients go into it."""

    @staticmethod
    def forward(call: Call, factor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        out = scaled(tensors, factor)
        if factor is not None:
            check(out, call.cells, counts=call.accumulates)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _remember(ctx, *inputs[:2], outward=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Tensors:
        present = [each for each in gradients if each is not None]
        factor = product(ctx.factor, ctx.call.begin(present, ctx.factor))
        return None, None, *_cross_some(Inward, ctx.call, factor, gradients)

    @staticmethod
    def jvp(ctx: Any, call: Any, factor: Any, *tangents: Tensor | None) -> Tensors:
        return _tangents(ctx, tangents)

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *inputs: Any) -> Any:
        return _batched(Outward, dims, inputs)


def cross(
    way: type[Function], call: Call, factor: Tensor | None, tensors: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Lets tensors cross the boundary."""
    if not torch.is_grad_enabled():
        return tuple(tensors) if factor is None else way.forward(call, factor, *tensors)
    if in_transform():
        return way.apply(call, factor, *tensors)
    # What `apply` itself does in this case, less binding the signature of `forward`: most of it.
    return super(Function, way).apply(call, factor, *tensors)  # type: ignore[misc]


def _accumulates(ctx: Any) -> bool:
    """Returns whether what leaves here is added to the gradients of parameters."""
    if is_tracing() or in_transform():
        return True
    nodes = [node for node, _ in ctx.next_functions if node is not None]
    # A region around lets them out to its parameters.
    return any(
        accumulates(node) if hasattr(node, "variable") else getattr(node, "outward", True) is False
        for node in nodes
    )


def _remember(ctx: Any, call: Call, factor: Tensor | None, *, outward: bool) -> None:
    ctx.call, ctx.factor, ctx.outward = call, factor, outward
    ctx.set_materialize_grads(False)


def _cross_some(
    way: type[Function], call: Call, factor: Tensor | None, tensors: Tensors
) -> Tensors:
    """Lets what is there cross the boundary, and keeps the gaps."""
    present = [each for each in tensors if each is not None]
    crossed = iter(cross(way, call, factor, present) if present else ())
    return tuple(None if each is None else next(crossed) for each in tensors)


def _widened(gradients: Tensors) -> Tensors:
    """Returns gradients that their true value would not underflow in; autograd casts them back.

    A float16 parameter with a master has its gradient in float32.
    """
    return tuple(
        each.float() if each is not None and each.dtype is torch.float16 else each
        for each in gradients
    )


def _tangents(ctx: Any, tangents: Tensors) -> Tensors:
    return tuple(
        each if each is None or ctx.factor is None else each * ctx.factor for each in tangents
    )


def _batched(way: type[Function], dims: tuple[Any, ...], inputs: tuple[Any, ...]) -> Any:
    # What happens at the boundary happens to each number by itself, so a batch needs no care.
    return way.apply(*inputs), dims[2:]
