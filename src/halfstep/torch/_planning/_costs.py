"""What a kind of operation costs in float32 and in a low format, and how far the two are apart."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from halfstep.core import Rule
from halfstep.torch._engine._actions import Casts, runner, tensors_of
from halfstep.torch._engine._weights import NoCache
from halfstep.torch._planning._recording import Kind
from halfstep.torch._planning._timing import alternate, plainly
from halfstep.torch._saved import saved_bytes

_TAKES_IT_AS_IT_IS = ("keep", "widest", "")
_LOWER = Rule("pointwise", "lower", "It is measured.")


class Cost(NamedTuple):
    """What a call costs, forward and backward.

    Args:
        seconds: How long it takes.
        saved_bytes: What is kept for backward.
        error: The norm of the difference from float32, of results and gradients, over their norm.
    """

    seconds: float
    saved_bytes: int = 0
    error: float = 0.0


_CANNOT = Cost(math.inf, 0, math.inf)


def costs(kind: Kind, device_type: str, low: torch.dtype, budget: float) -> tuple[Cost, Cost]:
    """Returns what a kind costs in float32 and in a low format, in which it then arrives.

    Args:
        kind: The kind.
        device_type: Where it runs.
        low: The low format.
        budget: The seconds that measuring may take.
    """
    wide, lower = _wide(kind), _low(kind, device_type, low)
    try:
        error = _distance(_drawn(wide), _drawn(lower))
    except RuntimeError:  # there is no kernel for this format
        return _timed([wide], device_type, budget)[0], _CANNOT
    in_wide, in_low = _timed([wide, lower], device_type, budget)
    return in_wide, in_low._replace(error=error)


def _timed(passes: "list[Pass]", device_type: str, budget: float) -> list[Cost]:
    spent = alternate([plainly(each) for each in passes], device_type, budget)
    return [Cost(s.seconds, _saved(each)) for s, each in zip(spent, passes, strict=True)]


def _drawn(call: "Pass") -> list[Tensor]:
    """Returns the results with the same random numbers each time."""
    torch.manual_seed(0)
    return call()


Pass = Callable[[], list[Tensor]]


def _wide(kind: Kind) -> Pass:
    return _pass(kind, kind.operation.overload, lambda tensor, _: tensor)


def _low(kind: Kind, device_type: str, low: torch.dtype) -> Pass:
    casts = Casts(device_type, low, NoCache())
    as_it_is = kind.action in _TAKES_IT_AS_IT_IS
    rule = Rule("pointwise", kind.action or "keep", "It is measured.") if as_it_is else _LOWER
    run = runner(rule, kind.operation)

    def cast(tensor: Tensor, lasting: bool) -> Tensor:
        return tensor if as_it_is and lasting else casts.one(tensor, low)

    return _pass(kind, lambda *args, **kw: run(kind.operation.overload, args, kw, casts), cast)


def _pass(kind: Kind, call: Callable[..., Any], cast: Callable[[Tensor, bool], Tensor]) -> Pass:
    """Returns what runs an example forward and backward, and returns results and gradients."""
    lasting = iter(kind.weights)

    def given(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        made = cast(value.detach(), next(lasting))
        return made.detach().requires_grad_(value.requires_grad)

    args, kwargs = _pytree.tree_map(given, (kind.args, kind.kwargs))
    leaves = [each for each in tensors_of((*args, *kwargs.values())) if each.requires_grad]

    def run() -> list[Tensor]:
        with torch.enable_grad():
            outputs = _floats(call(*args, **kwargs))
            ends = [
                (each, _gradient(kind, i, each))
                for i, each in enumerate(outputs)
                if each.requires_grad
            ]
            if not leaves or not ends:
                return outputs
            roots, grads = zip(*ends, strict=True)
            found = torch.autograd.grad(roots, leaves, grads, allow_unused=True)
        return [*outputs, *(each for each in found if each is not None)]

    return run


def _gradient(kind: Kind, index: int, output: Tensor) -> Tensor:
    known = kind.grads.get(index)
    if known is None or known.shape != output.shape:
        known = torch.ones_like(output)
    return known.to(output.dtype)


def _floats(result: Any) -> list[Tensor]:
    each = result if isinstance(result, list | tuple) else (result,)
    return [one for one in each if isinstance(one, Tensor) and one.is_floating_point()]


def _saved(call: Pass) -> int:
    with saved_bytes() as saved:
        call()
    return saved.bytes


def _distance(wide: list[Tensor], low: list[Tensor]) -> float:
    """Returns the largest relative distance of a result or a gradient."""
    return max((_relative(*pair) for pair in zip(wide, low, strict=True)), default=0.0)


def _relative(wide: Tensor, low: Tensor) -> float:
    wide, low = wide.detach().double(), low.detach().double()
    norm, apart = float(wide.norm()), float((wide - low).norm())
    return apart / norm if norm else (math.inf if apart else 0.0)
