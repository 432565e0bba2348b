"""Steps on the PyTorch backend of Keras, where the host asks once per step."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LOW = (torch.float16, torch.bfloat16)


def widened(grad: Any) -> Any:
    """Returns a low-precision gradient in float32, others as they are."""
    return grad.float() if grad.dtype in _LOW else grad


def eager() -> bool:
    """Returns whether what is assigned now is assigned once."""
    return True


def divided(grads: Sequence[Any], scale: Any) -> list[Any]:
    """Returns the gradients over the scale, all in one go."""
    given = [widened(grad) for grad in grads if grad is not None]
    quotients = iter(torch._foreach_div(given, scale) if given else ())
    return [None if grad is None else next(quotients) for grad in grads]


def values(grad: Any) -> Any:
    """Returns the numbers that a gradient holds."""
    return grad


def host(value: Any) -> Any:
    """Returns the numbers of a tensor on the host."""
    return value.tolist()


def all_finite(grads: Sequence[Any], undivided: Any) -> Any:
    """Returns whether every number is finite."""
    largest = torch._foreach_norm([g for g in grads if g.numel()], float("inf"))
    return torch.isfinite(torch.stack(largest)).all() if largest else torch.tensor(True)


def known(finite: Any) -> bool | None:
    """Returns the outcome, for which the host waits as Keras' own optimizer does."""
    return bool(finite)


def branch(
    finite: Any, grads: list[Any], update: Callable[[list[Any]], None], cell: Any, written: Any
) -> None:
    """Is never needed, because the host always knows."""
    raise AssertionError("the outcome of a step is always known with PyTorch")


def wide_product(scale: Any, factor: float) -> Any:
    """Returns the product rounded once to float32."""
    return (scale.double() * factor).float()
