"""The exchange of parameters and float32 stand-ins in an optimizer, for the time of a step."""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._masters._pieces import Piece
from halfstep.torch._masters._state import cut_state, joined_state
from halfstep.torch._masters._together import read_all, write_all
from halfstep.torch._masters._views import Views


class Scratches:
    """Float32 memory that is used again and again, on each device.

    Args:
        size: For how many numbers at a time.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._numbers: dict[torch.device, Tensor] = {}

    def clear(self) -> None:
        """Lets all of it be used again."""
        self._used = 0

    def like(self, piece: Piece) -> Tensor:
        """Returns memory that is free, or new if there is too little, shaped like a piece."""
        size, device = piece.size, piece.parameter.device
        start, self._used = self._used, self._used + size
        if self._used > self._size:
            return piece.within(_numbers(size, device), 0)
        if device not in self._numbers:
            self._numbers[device] = _numbers(self._size, device)
        return piece.within(self._numbers[device], start)


def _numbers(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)


class StandIn:
    """A float32 parameter that an optimizer sees in the place of a piece of another one.

    Args:
        piece: What it stands for.
        scratches: Where its numbers lie.
    """

    def __init__(self, piece: Piece, scratches: Scratches) -> None:
        self.piece = piece
        self.tensor = nn.Parameter(scratches.like(piece))
        self._wide = None if piece.parameter.grad_dtype is torch.float32 else scratches.like(piece)
        self._version = piece.parameter._version
        self._before: Tensor | None = None
        # What optimizers look for, such as marks of weights that are not to decay.
        self.tensor.__dict__.update(piece.parameter.__dict__)

    def take_gradient(self, *, watched: bool) -> None:
        """Takes the gradient of the parameter, and notes how to see whether that is written to."""
        parameter = self.piece.parameter
        self._version = parameter._version
        self._before = _bits_of(parameter).clone() if watched else None
        self.tensor.grad = self._gradient(parameter.grad)

    def _gradient(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or gradient.layout is not torch.strided:
            return None if gradient is None else gradient.detach().float()
        own = self.piece.of(gradient)
        return own if self._wide is None else self._wide.copy_(own)

    def refuse_bypassed(self) -> None:
        """Raises an error if the parameter itself was written to meanwhile."""
        own = self.piece.parameter
        changed = self._before is not None and not torch.equal(_bits_of(own), self._before)
        if changed or own._version != self._version:
            raise UsageError(
                "Masters need an optimizer that steps the parameters in its param_groups, got one "
                "that wrote to others, which it keeps elsewhere. Let it read "
                'group["params"] in each step.'
            )


def _bits_of(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.int16)


class Swap:
    """Stand-ins in the groups and the state of an optimizer; it can be undone and redone.

    Args:
        optimizer: The optimizer, whose groups and state are rewritten in place.
        pieces: What is to be stepped through stand-ins.
        others: Further parameters that the optimizer is to see, as they are.
        scratches: Memory for the stand-ins.
        watched: Whether to compare the parameters themselves, because writing through `.data` is
            seen by nobody.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pieces: Sequence[Piece],
        others: Iterable[Tensor],
        scratches: Scratches,
        *,
        watched: bool = False,
    ) -> None:
        scratches.clear()
        self._watched = watched
        self._views = Views(optimizer)
        self._pieces = pieces
        self._stands = [StandIn(piece, scratches) for piece in pieces]
        self._seen: dict[int, list[Tensor]] = {id(each): [each] for each in others}
        for stand in self._stands:
            self._seen.setdefault(id(stand.piece.parameter), []).append(stand.tensor)

    def __enter__(self) -> "Swap":
        read_all(self._pieces, [stand.tensor.detach() for stand in self._stands])
        for stand in self._stands:
            stand.take_gradient(watched=self._watched)
        self._views.show(self._seen)
        for state, stand in itertools.product(self._views.states, self._stands):
            if stand.piece.parameter in state:
                state[stand.tensor] = cut_state(state, stand.piece)
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._views.restore()
        for state, stand in itertools.product(self._views.states, self._stands):
            if stand.tensor in state:
                joined_state(state, stand.piece, state.pop(stand.tensor))
        if kind is None:
            self._store()

    def _store(self) -> None:
        for stand in self._stands:
            stand.refuse_bypassed()
            stand.tensor.grad = None
        write_all(self._pieces, [stand.tensor.detach() for stand in self._stands])

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Shows the parameters again for as long as a closure evaluates the model."""
        self.__exit__(None)
        try:
            yield
        finally:
            self.__enter__()
