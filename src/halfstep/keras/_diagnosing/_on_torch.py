"""Looking at a run on the PyTorch backend: below autograd, where forward and backward both pass."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Note = Callable[[str, Any, Any], None]

CASTS: tuple[type, ...] = ()

WORDS = {
    "cast": "cast",
    "_to_copy": "cast",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "addmm": "matmul",
    "baddbmm": "matmul",
    "bmm": "matmul",
    "convolution": "conv",
    "convolution_backward": "conv",
    "div": "divide",
    "linear": "matmul",
    "masked_fill": "where",
    "mm": "matmul",
    "mul": "multiply",
    "mv": "matmul",
    "pow": "power",
    "sub": "subtract",
}


class _Watching(TorchDispatchMode):
    def __init__(self, note: Note) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func.overloadpacket.__name__, (args, kwargs or {}), result)
        return result


@contextlib.contextmanager
def watching(note: Note) -> Iterator[None]:
    """Calls `note` after every operation until the block ends, whose random numbers are undrawn."""
    used = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(used), _Watching(note):
        yield


def whole() -> AbstractContextManager[Any]:
    """Lets a function run as it is, which is as a whole."""
    return contextlib.nullcontext()


def on_host(value: Any) -> Any:
    """Returns the numbers of a tensor."""
    if value.is_sparse:
        value = value.coalesce().values()
    value = value.detach().cpu()
    return (value if value.dtype == torch.float64 else value.float()).numpy()


def probe(value: Any, note: Callable[[Any], None]) -> Any:
    """Returns the value, whose gradient is handed to `note`."""
    if not value.requires_grad:
        return value
    result = value.view_as(value)
    result.register_hook(lambda grad: note(grad))
    return result


def gradients(loss: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[Any]:
    """Returns the gradients of a loss."""
    leaves = [each.detach().clone().requires_grad_() for each in values]
    with torch.enable_grad():
        total = loss(leaves)
    if not total.requires_grad:
        return [None] * len(leaves)
    return list(torch.autograd.grad(total, leaves, allow_unused=True))
