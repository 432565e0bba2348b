"""Records the operations of a step as the rules see them, with an example of each kind."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.core import Policy
from halfstep.torch._autocast import Inside, settings_of
from halfstep.torch._engine import _state
from halfstep.torch._engine._actions import tensors_of
from halfstep.torch._engine._ops import Operation, operation
from halfstep.torch._engine._paths import PATHS
from halfstep.torch._observing._roles import storage
from halfstep.torch._planning._steps import Trial
from halfstep.torch._private import in_transform

_BOOKKEEPING = ("aten::detach", "aten::lift_fresh")


class Source(NamedTuple):
    """A tensor that a call reads.

    Args:
        maker: The number of the call that made it, None for what was there before.
        shape: Its shape.
        trained: Whether it has a gradient.
    """

    maker: int | None
    shape: tuple[int, ...]
    trained: bool


@dataclass(eq=False)
class Kind:
    """Calls that are alike, and the arguments of the first of them.

    Args:
        operation: The operation.
        action: What the rules say about it, "" where they say nothing.
        args: The arguments.
        kwargs: The arguments by name.
        movable: Whether its precision can be chosen and measured.
        weights: Which of its tensors were there before the step.
        grads: The gradients of its results, as far as they are known.
    """

    operation: Operation
    action: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    movable: bool
    weights: tuple[bool, ...] = ()
    grads: dict[int, Tensor] = field(default_factory=dict)


class Call(NamedTuple):
    """One call of an operation.

    Args:
        kind: The number of its kind.
        path: The dotted path of the module in which it ran.
        sources: The float tensors that it read.
    """

    kind: int
    path: str
    sources: tuple[Source, ...]


class Recorder(TorchDispatchMode):
    """Runs a step in the formats that it arrives in, and takes note of each operation.

    Operations with a rule tell of themselves, above autograd; others are seen going by, below it.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.kinds: list[Kind] = []
        self._numbers: dict[Any, int] = {}
        self._makers: dict[int, int] = {}
        self._depth = 0
        self._lasting = {storage(each) for each in (*model.parameters(), *model.buffers())}

    # Nothing is cast, so there is nothing to count.
    seen = 0

    def count_cast(self, result: Tensor) -> None:
        """Counts nothing."""

    def ruled(
        self, operation: Operation, action: str, args: Any, kwargs: Any, call: Callable[[], Any]
    ) -> Any:
        """Runs an operation that a rule decides about as if there were none."""
        return self._run(operation, action, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._run(operation(func), "", args, kwargs or {})

    def _run(self, found: Operation, action: str, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            result = found.overload(*args, **kwargs)
            if self._depth == 1 and found.overload._schema.name not in _BOOKKEEPING:
                self._note(found, action, args, kwargs, result)
        finally:
            self._depth -= 1
        return result

    def _note(self, found: Operation, action: str, args: Any, kwargs: Any, result: Any) -> None:
        outputs = [each for each in _outputs(result) if each.is_floating_point()]
        inputs = [
            each for each in tensors_of((*args, *kwargs.values())) if each.is_floating_point()
        ]
        if outputs:
            sources = tuple(self._source(each) for each in inputs)
            kind = self._kind(found, action, args, kwargs)
            self.calls.append(Call(kind, PATHS.current(), sources))
            self._makers.update((storage(each), len(self.calls) - 1) for each in outputs)
            self._follow(self.kinds[kind], outputs)

    def _source(self, tensor: Tensor) -> Source:
        return Source(self._makers.get(storage(tensor)), tuple(tensor.shape), tensor.requires_grad)

    def _kind(self, found: Operation, action: str, args: Any, kwargs: Any) -> int:
        key = (found.name, action, _described((args, kwargs)))
        if key not in self._numbers:
            self._numbers[key] = len(self.kinds)
            self.kinds.append(self._example(found, action, args, kwargs))
        return self._numbers[key]

    def _example(self, found: Operation, action: str, args: Any, kwargs: Any) -> Kind:
        lasting = tuple(
            storage(each) in self._lasting for each in tensors_of((*args, *kwargs.values()))
        )
        if not _is_movable(found, args, kwargs):
            return Kind(found, action, (), {}, movable=False)
        kept_args, kept_kwargs = _pytree.tree_map(self._kept, (tuple(args), dict(kwargs)))
        return Kind(found, action, kept_args, kept_kwargs, movable=True, weights=lasting)

    def _kept(self, value: Any) -> Any:
        """Returns a tensor as it is now: what follows may write to it."""
        if not isinstance(value, Tensor):
            return value
        copy = value.detach()
        copy = copy if storage(value) in self._lasting else copy.clone()
        return copy.requires_grad_(value.requires_grad)

    def _follow(self, kind: Kind, outputs: list[Tensor]) -> None:
        """Keeps the gradients that arrive at an example."""
        for index, each in enumerate(outputs):
            if kind.movable and each.requires_grad and not each.is_leaf and index not in kind.grads:
                kind.grads[index] = torch.empty(0)
                each.register_hook(lambda grad, index=index: _keep(kind, index, grad))


def recorded(trial: Trial, policy: Policy) -> Recorder:
    """Returns what a step does, and what the rules of a policy say about it.

    Args:
        trial: The step.
        policy: The policy, in whose dtype nothing is computed.
    """
    recorder = Recorder(trial.model)
    inside = Inside(settings_of(policy, trial.device_type))
    with trial.untouched():
        with _state.observed(recorder), inside, recorder:
            loss = trial.forward()
        loss.backward()
    return recorder


def _keep(kind: Kind, index: int, grad: Tensor) -> None:
    kind.grads[index] = grad.detach().clone()


def _is_movable(found: Operation, args: Any, kwargs: Any) -> bool:
    """Returns whether a rule can choose in which precision an operation runs, and it runs again."""
    schema = found.overload._schema
    floats = [each for each in tensors_of((*args, *kwargs.values())) if each.dtype is torch.float32]
    plain = not schema.is_mutable and not _is_view(found.overload)
    # What a transform wraps means nothing outside of it.
    return bool(floats) and plain and not in_transform()


def _is_view(overload: Any) -> bool:
    return any(each.alias_info is not None for each in overload._schema.returns)


def _outputs(result: Any) -> Iterator[Tensor]:
    for each in result if isinstance(result, list | tuple) else (result,):
        if isinstance(each, Tensor):
            yield each


def _described(value: Any) -> Any:
    """Returns what calls have in common that take the same time."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(each)) for name, each in value.items())
    return repr(value)
