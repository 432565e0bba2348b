"""A call of a model that a script made, kept so that it can be made again."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep.torch._autocast import Inside, Settings
from halfstep.torch._engine import _state
from halfstep.torch._leaving import watch_leaving
from halfstep.torch._observing._counting import numbers_in
from halfstep.torch._observing._sizes import is_finite
from halfstep.torch._observing._sources import entered, marked
from halfstep.torch._private import preserved_version
from halfstep.torch._regions._forward import forward_of
from halfstep.torch._regions._tree import tensors_in, with_tensors


class Call(NamedTuple):
    """A call of a model that is not part of another one.

    Args:
        model: The model.
        number: How many calls of models there were when it was made.
        given: Copies of the arguments, positional and by name.
        buffers: The buffers of the model, and copies from before the call.
        around: The autocasts, PyTorch's own or ours, that the call was in.
        source: The line that the innermost one of them was made in.
        cotangents: The gradients that came back to each output, None where none did.
        scales: What the loss was multiplied by that they came from, where that is known.
        left: Whether the gradients that it handed on were finite, on their devices.
        region_scale: The scale of the region that the model is, None where it is none.
    """

    model: nn.Module
    number: int
    given: tuple[tuple[Any, ...], dict[str, Any]]
    buffers: list[tuple[Tensor, Tensor]]
    around: tuple[Settings, ...]
    source: str
    cotangents: list[Tensor | None]
    scales: list[Any]
    left: list[Tensor]
    region_scale: Tensor | None = None

    def again(self, model: nn.Module) -> list[Tensor]:
        """Calls a model in the same way, and returns the tensors of its output."""
        args, kwargs = self.given
        with contextlib.ExitStack() as stack:
            for each in self.around:
                stack.enter_context(_inside(each, self.source))
            return tensors_in(model(*args, **kwargs))

    @classmethod
    def of(
        cls, model: nn.Module, args: Any, kwargs: Any, source: str = "", number: int = 0
    ) -> "Call":
        """Returns a call that is about to be made."""
        buffers = [(each, each.clone()) for each in model.buffers()]
        forward, given = forward_of(model), (args, kwargs)
        scale = None if forward is None else forward.region._cells.scale.clone()
        around = _around(model, given)
        return cls(model, number, _copied(given), buffers, around, source, [], [], [], scale)

    def made(
        self,
        given: list[Tensor],
        outputs: list[Tensor],
        scale: Callable[[], Any] = lambda: None,
    ) -> None:
        """Takes note of what it returned, and later of the gradients that go through it.

        Args:
            given: The tensors that it was called with.
            outputs: Those that it returned.
            scale: Tells what the loss was multiplied by that goes backward.
        """
        watch_leaving(given, outputs, self.left)
        self.cotangents.extend([None] * len(outputs))
        for index, tensor in enumerate(outputs):
            if tensor.requires_grad:
                tensor.register_hook(_receiver(self, index, scale))

    @property
    def scale(self) -> float | None:
        """What the loss was multiplied by last, None where that is not known."""
        known = [each for each in self.scales if each is not None]
        return float(known[-1]) if known else None

    @property
    def entered_broken(self) -> bool:
        """Whether a gradient that came back was not finite."""
        there = [each for each in self.cotangents if each is not None]
        return not all(bool(is_finite(each)) for each in there)

    @property
    def broke(self) -> bool:
        """Whether it made of finite gradients some that were not, for what was called before."""
        return not (self.entered_broken or all(map(bool, self.left)))

    @property
    def is_given_sound(self) -> bool:
        """Whether it was called with numbers, -inf of a mask included."""
        given = numbers_in(tensors_in(self.given))
        return not any(bool((each.isnan() | (each == math.inf)).any()) for each in given)

    @property
    def largest_given(self) -> float:
        """The largest finite magnitude of the data that it was called with."""
        data = [each for each in tensors_in(self.given) if not each.requires_grad]
        found = (each[each.isfinite()] for each in numbers_in(data))
        return max((float(each.abs().max()) for each in found if each.numel()), default=0.0)

    @property
    def has_history(self) -> bool:
        """Whether it was called with something that was computed of parameters."""
        return any(each.requires_grad for each in tensors_in(self.given))


@torch.no_grad()
def put(values: list[tuple[Tensor, Tensor]]) -> None:
    """Gives each first tensor the numbers of the second one."""
    for target, value in values:
        # A backward pass of the script may still need what it has seen there.
        with preserved_version(target):
            target.copy_(value)


def _receiver(call: Call, index: int, scale: Callable[[], Any]) -> Callable[[Tensor | None], None]:
    def receive(gradient: Tensor | None) -> None:
        call.scales[:] = [scale()]
        # An output that nothing comes back to may have an undefined gradient.
        call.cotangents[index] = None if gradient is None else gradient.detach().clone()

    return receive


def _copied(given: Any) -> Any:
    copies = [each.detach().clone() for each in tensors_in(given)]
    for copied, each in zip(copies, tensors_in(given), strict=True):
        copied.requires_grad_(each.requires_grad)
    return with_tensors(given, copies)


def _around(model: nn.Module, given: Any) -> tuple[Settings, ...]:
    """Returns the autocasts that a model is in; those without rules of ours are PyTorch's own."""
    tensors = [*model.parameters(), *tensors_in(given)]
    devices = dict.fromkeys(each.device.type for each in tensors)
    rules = {each.device_type: each.table.rules_text for each in reversed(_state.actives())}
    found = tuple(
        Settings(each, torch.get_autocast_dtype(each), True, False, rules.get(each, ""))
        for each in devices
        if torch.amp.is_autocast_available(each) and torch.is_autocast_enabled(each)
    )
    if found or not _state.entered():
        return found
    return (Settings("cpu", torch.get_autocast_dtype("cpu"), False, False, ""),)


@contextlib.contextmanager
def _inside(settings: Settings, source: str) -> Iterator[None]:
    if settings.enabled and not settings.rules:
        with marked(torch.autocast(settings.device_type, dtype=settings.dtype), source):
            yield
        return
    region = Inside(settings)
    with entered(source):
        region.__enter__()
    try:
        yield
    finally:
        region.__exit__()


def loss_of(calls: list[Call], scale: float, *, broken: bool = False) -> Callable[..., Tensor]:
    """Returns a loss whose gradients at the outputs are those that came back, unscaled.

    Args:
        calls: The calls of one model.
        scale: What the gradients were multiplied by.
        broken: Whether those that are not finite come back as well, or are taken for zero.
    """
    # Looked at here, where nobody sees what is read.
    known = [[_known(each, broken) for each in call.cotangents] for call in calls]

    def loss_fn(model: nn.Module, _batch: Any) -> Tensor:
        total = torch.zeros(())
        for call, cotangents in zip(calls, known, strict=True):
            for output, cotangent in zip(call.again(model), cotangents, strict=True):
                if output.is_floating_point() or output.is_complex():
                    total = total.to(output.device) + _product(output, cotangent, scale)
        return total

    return loss_fn


def _known(cotangent: Tensor | None, broken: bool) -> Tensor | None:
    """Returns a gradient that came back, None for one that is not finite unless those count."""
    counts = cotangent is None or broken or bool(is_finite(cotangent))
    return cotangent if counts else None


def _product(output: Tensor, cotangent: Tensor | None, scale: float) -> Tensor:
    """Returns a sum whose gradient is what came back, and which is finite if what it needs is.

    What a mask has set to -inf, nothing comes back to.
    """
    output, cotangent = _real(output), None if cotangent is None else _real(cotangent)
    if cotangent is None:
        # Nothing is known of the way back, so it is zero; what is not finite makes NaN of that.
        return torch.where(output == -math.inf, 0.0, output.float()).sum() * 0.0
    needed = torch.where(output.isfinite() | (cotangent != 0), output.float(), 0.0)
    return (needed * (cotangent.float() / scale)).sum()


def _real(tensor: Tensor) -> Tensor:
    """Returns the numbers of a tensor, dense and the two parts of complex ones for themselves."""
    whole = tensor if tensor.layout in (torch.strided, torch.jagged) else tensor.to_dense()
    return torch.view_as_real(whole.resolve_conj()) if whole.is_complex() else whole
