"""A call of a region that can be made again, with the gradients that came back to it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from halfstep.torch._regions._tree import tensors_in, with_tensors


class Repeated:
    """A call of a region, to be made before the arguments change.

    Args:
        args: What it was called with.
        kwargs: What it was called with by name.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = tensors_in((args, kwargs))
        # Apart from the graph in front of it, which is not gone through again.
        self._called = with_tensors((args, kwargs), [_apart(each) for each in tensors])
        self._drawn = torch.get_rng_state(), get_device_states(*tensors)
        self._gradients: dict[int, Tensor] = {}

    def watch(self, output: Any) -> None:
        """Keeps the gradients that come back to an output."""
        for place, tensor in enumerate(tensors_in(output)):
            if tensor.requires_grad:
                tensor.register_hook(self._keeper(place))

    def _keeper(self, place: int) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self._gradients[place] = _finite(gradient.detach())

        return keep

    def loss(self, module: nn.Module) -> Tensor:
        """Makes the call again, and returns a number to which it has the same gradients."""
        random, devices = self._drawn
        torch.set_rng_state(random)
        set_device_states(*devices)
        args, kwargs = self._called
        outputs = tensors_in(module(*args, **kwargs))
        parts = [(outputs[at] * each).sum().float() for at, each in self._gradients.items()]
        return torch.stack(parts).sum() if parts else torch.zeros(())


def _finite(gradient: Tensor) -> Tensor:
    """Returns a gradient, that of a mean where what came back says nothing but that all is lost."""
    return (
        gradient if gradient.isfinite().all() else torch.full_like(gradient, 1 / gradient.numel())
    )


def _apart(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def made_again(module: nn.Module, calls: Sequence[Repeated]) -> Tensor:
    """Makes calls again, and returns a number with the gradients that came back to them."""
    return torch.stack([each.loss(module) for each in calls]).sum()
