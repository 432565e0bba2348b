"""Feeds a fused optimizer kernel in blocks: each byte is read from memory once.

The optimizer is shown stand-ins without memory of their own. When it calls its kernel, the kernel
is called for one block after another: masters are put together, stepped and split again while they
are in the cache.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.torch._masters._kept import kept_or_new, write
from halfstep.torch._masters._pieces import Piece, cut, packed
from halfstep.torch._masters._state import is_laid_out
from halfstep.torch._masters._swap import Scratches

_ATEN = torch.ops.aten
KERNELS = {
    overload
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    for kernel in [getattr(_ATEN, name)]
    for overload in [getattr(kernel, each) for each in kernel.overloads()]
}


def written(kind: Any) -> Any:
    """Returns the step of a class of optimizers as it was written, without what wraps it."""
    return inspect.unwrap(kind.step)


_STEPS = {written(getattr(torch.optim, name)) for name in ("Adam", "AdamW", "SGD", "Adagrad")}


def is_fused(optimizer: Optimizer) -> bool:
    """Returns whether nothing but a fused kernel touches the parameters of an optimizer."""
    known = written(type(optimizer)) in _STEPS
    return known and all(group.get("fused") is True for group in optimizer.param_groups)


class Stream(TorchDispatchMode):
    """Runs the kernels that meet stand-ins block by block.

    Args:
        optimizer: A fused optimizer.
        parameters: What is to be stepped through stand-ins.
        limit: How many numbers a block may have.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], limit: int) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._limit = limit
        self._pairs = [(each, _stand_in(each)) for each in parameters]
        self._parameters = {id(stand): parameter for parameter, stand in self._pairs}
        self._lists = [(group["params"], [*group["params"]]) for group in optimizer.param_groups]

    def __enter__(self) -> Any:
        stands = {id(parameter): stand for parameter, stand in self._pairs}
        for shown, full in self._lists:
            shown[:] = [stands.get(id(each), each) for each in full]
        self._move_state((parameter, stand) for parameter, stand in self._pairs)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for shown, full in self._lists:
            shown[:] = full
        self._move_state((stand, parameter) for parameter, stand in self._pairs)

    def _move_state(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        state = self._optimizer.state
        for source, target in pairs:
            if source in state:
                state[target] = state.pop(source)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a kernel in blocks, and anything else as it is."""
        kwargs = kwargs or {}
        if function not in KERNELS:
            return function(*args, **kwargs)
        rows = list(range(len(args[0])))
        others = [row for row in rows if id(args[0][row]) not in self._parameters]
        if others:
            function(*[[each[row] for row in others] if each else each for each in args], **kwargs)
        columns = {id(args[0][row]): [each[row] for each in args if each] for row in rows}
        empty = [not each for each in args]
        self._run(function, columns, empty, kwargs)
        return None

    def _run(
        self, function: Any, columns: dict[int, list[Tensor]], empty: Any, kwargs: Any
    ) -> None:
        pieces: list[Piece] = []
        values: dict[int, list[Tensor]] = {}
        for number, column in columns.items():
            if number in self._parameters:
                parameter = self._parameters[number]
                values[id(parameter)] = column[2:]
                pieces += self._cut(parameter, column[2:])
        if not pieces:
            return
        scratches = Scratches(2 * self._limit)
        for block in packed(pieces, self._limit):
            scratches.clear()
            rows = [_row(piece, values[id(piece.parameter)], scratches) for piece in block]
            lists = [list(each) for each in zip(*rows, strict=True)]
            full = iter(lists)
            function(*[[] if none else next(full) for none in empty], **kwargs)
            for piece, row in zip(block, rows, strict=True):
                write(piece, row[0])

    def _cut(self, parameter: Tensor, state: list[Tensor]) -> list[Piece]:
        own = [parameter.grad, *[each for each in state if each.dim()]]
        alike = all(is_laid_out(each, parameter) for each in own)
        return cut(parameter, self._limit) if alike else [Piece(parameter)]


def _stand_in(parameter: Tensor) -> Tensor:
    """Returns a float32 parameter of the same shape, without memory where the layout allows."""
    if parameter.is_contiguous():
        hollow = torch.full((), torch.nan, device=parameter.device).expand(parameter.shape)
    else:
        hollow = torch.empty_like(parameter.detach(), dtype=torch.float32)
    stand = nn.Parameter(hollow)
    stand.grad = hollow
    return stand


def _row(piece: Piece, state: list[Tensor], scratches: Scratches) -> list[Tensor]:
    """Returns what the kernel is given for a piece: value, gradient and state."""
    parameter = piece.parameter
    value = scratches.like(piece)
    kept_or_new(parameter).read(piece, value)
    assert parameter.grad is not None
    gradient = piece.of(parameter.grad)
    if gradient.dtype is not torch.float32:
        gradient = scratches.like(piece).copy_(gradient)
    own = [piece.of(each) if is_laid_out(each, parameter) else each for each in state]
    return [value, gradient, *own]
