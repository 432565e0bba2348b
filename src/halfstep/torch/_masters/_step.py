"""One step of an optimizer through float32 masters, in the way that suits it best."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.torch._masters._pieces import Piece, cut, packed, size_of
from halfstep.torch._masters._state import may_be_cut
from halfstep.torch._masters._stream import Stream, is_fused, written
from halfstep.torch._masters._swap import Scratches, Swap
from halfstep.torch._once import without
from halfstep.torch._scaling._closure import closure_of, with_closure, without_closure
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._optimizers import PerOptimizer

if TYPE_CHECKING:
    from halfstep.torch._masters._feeding import Feeding

Run = Callable[..., Any]

# Kernels that go through more than the caches hold at a time read everything twice.
_BLOCK = 2**20
# The most numbers that a CPU works on at once.
_VECTOR = 16
# What a number costs while its optimizer steps: a master, and a gradient.
_BYTES = 8

_DEFAULT_LIMIT = 2**28

_BY_NUMBER = (
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
# Steps whose update of a number depends on nothing but the state of that number.
_OF_NUMBERS = {written(getattr(torch.optim, name)) for name in _BY_NUMBER}
# Modules whose optimizers update each parameter by itself, but for those that do not.
_BY_PARAMETER = ("torch.optim.", "torchao.")
_TOGETHER = {written(torch.optim.LBFGS)}


# Those whose first step wrote to nothing but what it was shown.
_watched_once: PerOptimizer[bool] = PerOptimizer()
# The optimizers that step through masters at the moment.
stepping: PerOptimizer[bool] = PerOptimizer()


def step_through(
    feeding: "Feeding", optimizer: Optimizer, own: Run | None, args: Any, kwargs: Any
) -> Any:
    """Steps an optimizer, with masters in the place of its parameters."""
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return _step_together(feeding, optimizer, own, args, kwargs)
    if own is not None:
        optimizer._opt_called = True  # type: ignore[attr-defined]
    hooked = type(optimizer).step
    plain: Any = getattr(hooked, "__wrapped__", hooked) if _is_hooked(hooked) else hooked
    run = functools.partial(_choose(feeding, optimizer), feeding=feeding, plain=plain)
    # Else hooks would be called once per bucket, and see stand-ins.
    around = Optimizer.profile_hook_step(run) if _is_hooked(hooked) else run
    with _stepping(optimizer):
        return around(optimizer, *args, **kwargs)


@contextlib.contextmanager
def _stepping(optimizer: Optimizer) -> Iterator[None]:
    stepping[optimizer] = True
    try:
        yield
    finally:
        stepping.pop(optimizer)


def _is_hooked(step: Any) -> bool:
    return getattr(step, "hooked", False) and hasattr(step, "__wrapped__")


def _choose(feeding: "Feeding", optimizer: Optimizer) -> Run:
    if is_fused(optimizer):
        return _step_streamed
    apart = feeding.limit is not None or _is_known(optimizer)
    return _step_in_buckets if apart and not steps_together(optimizer) else _step_whole


def _is_known(optimizer: Optimizer) -> bool:
    return type(optimizer).step.__module__.startswith(_BY_PARAMETER)


def steps_together(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer is known to look at all of its parameters at once."""
    return written(type(optimizer)) in _TOGETHER


def _with_gradient(parameters: list[Tensor]) -> list[Tensor]:
    return [each for each in parameters if each.grad is not None]


def _evaluated(args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Returns the loss of a closure that is evaluated once, and the arguments without it."""
    closure = closure_of(args, kwargs)
    if closure is None:
        return None, args, kwargs
    with torch.enable_grad():
        loss = closure()
    return loss, *without_closure(args, kwargs)


def _step_streamed(
    optimizer: Optimizer, *args: Any, feeding: "Feeding", plain: Run, **kwargs: Any
) -> Any:
    loss, args, kwargs = _evaluated(args, kwargs)
    fed = _with_gradient(feeding.of(optimizer))
    with Stream(optimizer, fed, _block(fed, feeding.limit)):
        plain(optimizer, *args, **kwargs)
    return loss


def _block(parameters: list[Tensor], limit: int | None) -> int:
    """Returns how many numbers a block has."""
    most = (limit or _DEFAULT_LIMIT) // _BYTES
    # What a kernel does one by one, after the last whole vector, it rounds in another way.
    most -= most % _VECTOR
    return min(most, _BLOCK) if parameters and parameters[0].is_cpu else most


def _step_in_buckets(
    optimizer: Optimizer, *args: Any, feeding: "Feeding", plain: Run, **kwargs: Any
) -> Any:
    loss, args, kwargs = _evaluated(args, kwargs)
    fed = _with_gradient(feeding.of(optimizer))
    numbers = _block(fed, feeding.limit)
    pieces = (piece for each in fed for piece in _pieces(optimizer, each, numbers))
    buckets = packed(pieces, numbers)
    scratches = Scratches(2 * max((size_of(each) for each in buckets), default=0))
    parts: list[tuple[list[Piece], list[Tensor]]] = [(bucket, []) for bucket in buckets]
    others = without(parameters_of(optimizer), fed)
    if _with_gradient(others):
        parts.append(([], others))
    settings = [_settings_of(group) for group in optimizer.param_groups]
    for bucket, alone in parts:
        # Each is a part of the same step, also for an optimizer that counts in its groups.
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before)
        with Swap(optimizer, bucket, alone, scratches):
            plain(optimizer, *args, **kwargs)
    return loss


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _pieces(optimizer: Optimizer, parameter: Tensor, numbers: int) -> list[Piece]:
    by_number = written(type(optimizer)) in _OF_NUMBERS
    if by_number and may_be_cut(parameter, optimizer.state.get(parameter)):
        return cut(parameter, numbers)
    return [Piece(parameter)]


def _step_whole(
    optimizer: Optimizer, *args: Any, feeding: "Feeding", plain: Run, **kwargs: Any
) -> Any:
    run = functools.partial(plain, optimizer)
    return _step_together(feeding, optimizer, run, args, kwargs)


def _step_together(
    feeding: "Feeding", optimizer: Optimizer, run: Run, args: Any, kwargs: Any
) -> Any:
    """Steps an optimizer that looks at all of its parameters at once."""
    closure, own = closure_of(args, kwargs), feeding.of(optimizer)
    # A closure is going to make gradients, wherever one is wanted.
    fed = _with_gradient(own) if closure is None else [each for each in own if each.requires_grad]
    pieces = [Piece(each) for each in fed]
    others, scratches = without(parameters_of(optimizer), fed), Scratches(2 * size_of(pieces))
    watched = not (_is_known(optimizer) or _watched_once.get(optimizer))
    with Swap(optimizer, pieces, others, scratches, watched=watched) as swap:
        if closure is not None:
            args, kwargs = with_closure(args, kwargs, _showing(swap, closure))
        result = run(*args, **kwargs)
    _watched_once[optimizer] = True
    return result


def _showing(swap: Swap, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Returns a closure that evaluates the model with its own parameters."""

    def evaluate() -> Any:
        with swap.undone():
            return closure()

    return evaluate
