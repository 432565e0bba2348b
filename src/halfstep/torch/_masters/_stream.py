"""Feeds a fused optimizer kernel in blocks: each byte is read from memory once.

The optimizer is shown stand-ins without memory of their own. When it calls its kernel, the kernel
is called for one block after another: masters are put together, stepped and split again while they
are in the cache.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.torch._masters._kept import kept_or_new
from halfstep.torch._masters._pieces import Piece, cut, packed
from halfstep.torch._masters._state import is_laid_out
from halfstep.torch._masters._swap import Scratches
from halfstep.torch._masters._together import read_all, write_all
from halfstep.torch._masters._views import Views
from halfstep.torch._scaling._gradients import parameters_of

_ATEN = torch.ops.aten
KERNELS = {
    overload
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    for kernel in [getattr(_ATEN, name)]
    for overload in [getattr(kernel, each) for each in kernel.overloads()]
}


# A parameter, its gradient and its state.
Row: TypeAlias = list[Tensor]


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
        self._limit = limit
        self._pairs = [(each, _stand_in(each)) for each in parameters]
        self._parameters = {id(stand): parameter for parameter, stand in self._pairs}
        self._views = Views(optimizer)
        self._seen = {id(each): [each] for each in parameters_of(optimizer)}
        self._seen |= {id(parameter): [stand] for parameter, stand in self._pairs}

    def __enter__(self) -> Any:
        self._views.show(self._seen)
        for parameter, stand in self._pairs:
            self._views.move_state(parameter, stand)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._views.restore()
        for parameter, stand in self._pairs:
            self._views.move_state(stand, parameter)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a kernel in blocks, and anything else as it is."""
        if function not in KERNELS:
            return function(*args, **(kwargs or {}))
        table = _Table(function, args, kwargs or {})
        table.run([row for row in table.rows if id(row[0]) not in self._parameters])
        self._run(table, [row for row in table.rows if id(row[0]) in self._parameters])
        return None

    def _run(self, table: "_Table", found: list[Row]) -> None:
        """Steps what stand-ins stand for, a block at a time."""
        known = [(self._parameters[id(stand)], own) for stand, _, *own in found]
        state = {id(parameter): own for parameter, own in known}
        pieces = [piece for parameter, own in known for piece in self._cut(parameter, own)]
        scratches = Scratches(2 * self._limit)
        for block in packed(pieces, self._limit):
            scratches.clear()
            values = [scratches.like(piece) for piece in block]
            read_all(block, values)
            gradients = _gradients(block, values, scratches)
            states = [_state(piece, state[id(piece.parameter)]) for piece in block]
            rows = zip(values, gradients, states, strict=True)
            table.run([[value, gradient, *own] for value, gradient, own in rows])
            write_all(block, values)

    def _cut(self, parameter: Tensor, state: list[Tensor]) -> list[Piece]:
        if parameter.numel() <= self._limit:
            return [Piece(parameter)]
        own = [parameter.grad, *[each for each in state if each.dim()]]
        alike = all(is_laid_out(each, parameter) for each in own)
        return cut(parameter, self._limit) if alike else [Piece(parameter)]


class _Table:
    """The arguments of a kernel, one row for each parameter.

    Args:
        kernel: The kernel.
        lists: Parameters, gradients and state. A list may be empty.
        settings: All else.
    """

    def __init__(self, kernel: Any, lists: Sequence[list[Tensor]], settings: Any) -> None:
        self._kernel = kernel
        self._is_empty = [not each for each in lists]
        self._settings = settings
        self.rows: list[Row] = [[*row] for row in zip(*filter(None, lists), strict=True)]

    def run(self, rows: list[Row]) -> None:
        """Calls the kernel for some rows."""
        if rows:
            columns = iter([[*column] for column in zip(*rows, strict=True)])
            lists = [[] if empty else next(columns) for empty in self._is_empty]
            self._kernel(*lists, **self._settings)


def _stand_in(parameter: Tensor) -> Tensor:
    """Returns a float32 parameter of the same shape, without memory where the layout allows."""
    master = kept_or_new(parameter)
    if master.stand is not None:
        return master.stand
    if not parameter.is_contiguous():
        return _parameter(torch.empty_like(parameter.detach(), dtype=torch.float32))
    hollow = torch.full((), torch.nan, device=parameter.device).expand(parameter.shape)
    master.stand = _parameter(hollow)
    return master.stand


def _parameter(values: Tensor) -> Tensor:
    stand = nn.Parameter(values)
    stand.grad = values
    return stand


def _gradients(
    pieces: Sequence[Piece], values: Sequence[Tensor], scratches: Scratches
) -> list[Tensor]:
    """Returns gradients in float32, copied where they are not or lie in another way."""
    own = [_gradient(piece) for piece in pieces]
    # Kernels on a CPU take for granted that values and gradients lie in memory alike.
    fed = [
        gradient
        if gradient.dtype is torch.float32 and gradient.stride() == value.stride()
        else scratches.like(piece)
        for piece, value, gradient in zip(pieces, values, own, strict=True)
    ]
    copies = [pair for pair in zip(fed, own, strict=True) if pair[0] is not pair[1]]
    if copies:
        torch._foreach_copy_([to for to, _ in copies], [source for _, source in copies])
    return fed


def _gradient(piece: Piece) -> Tensor:
    gradient = piece.parameter.grad
    assert gradient is not None
    return piece.of(gradient)


def _state(piece: Piece, state: list[Tensor]) -> list[Tensor]:
    if piece.stop is None:
        return state
    return [piece.of(each) if is_laid_out(each, piece.parameter) else each for each in state]
