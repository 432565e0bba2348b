"""An average of a model's weights that is kept in float32, whatever the model is in."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import swa_utils

from halfstep.errors import UsageError
from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._kept import true_value
from halfstep.torch._private import averages_lists, convert
from halfstep.torch._regions._attach import uncompiled
from halfstep.torch._regions._forward import forward_of

Pair = tuple[Tensor, Tensor]
AverageOne = Callable[[Tensor, Tensor, Tensor | int], Tensor]
Tensors = tuple[Tensor, ...] | list[Tensor]
AverageMany = Callable[[Tensors, Tensors, Tensor | int], None]

# How many numbers of a model are copied at a time.
_AT_ONCE = 2**24


class AveragedModel(swa_utils.AveragedModel):
    """An average of a model's weights (EMA, SWA) that is kept in float32, whatever the model is in.

    It is PyTorch's, with the same arguments, recipes and state dict, and for a float32 model the
    same bits. A weight in half precision is averaged by its exact value, in float32, because the
    small steps of an average are lost in half precision. `averaged.module` holds the average;
    calling the averaged model runs it in the dtypes of the model.

    Args:
        model: The model, prepared or not.
        device: Where the average is kept, None for where the model is.
        avg_fn: Averages one tensor. Without any function, all updates weigh the same (SWA).
        multi_avg_fn: Averages a list of tensors in place. Tensors that need a float32 copy come in
            several short lists.
        use_buffers: Whether buffers are averaged too, and not only copied.

    Example:
        >>> import torch
        >>> from torch.optim.swa_utils import get_ema_multi_avg_fn
        >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        >>> for value in (1.0, 2.0):
        ...     _ = torch.nn.init.constant_(model.weight, value)
        ...     ema.update_parameters(model)
        >>> round(ema.module.weight.item(), 6), ema(torch.ones(1, 1).bfloat16()).dtype
        (1.001, torch.bfloat16)
    """

    def __init__(
        self,
        model: nn.Module,
        device: int | torch.device | None = None,
        avg_fn: AverageOne | None = None,
        multi_avg_fn: AverageMany | None = None,
        use_buffers: bool = False,
    ) -> None:
        _check_module(model, "AveragedModel")
        super().__init__(model, device, avg_fn, multi_avg_fn, use_buffers)
        self._narrow = _narrow_dtypes(self.module)
        _widen(self.module)
        for averaged, current in zip(self.module.parameters(), model.parameters(), strict=True):
            if current.dtype in HALF:
                averaged.detach().copy_(true_value(current))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the averaged model in the dtypes of the model."""
        if not self._narrow or forward_of(uncompiled(self.module)) is not None:
            return self.module(*args, **kwargs)
        wide = dict(chain(self.module.named_parameters(), self.module.named_buffers()))
        narrow = {name: wide[name].to(dtype) for name, dtype in self._narrow.items()}
        seen = {name: (tensor, tensor._version) for name, tensor in narrow.items()}
        output = functional_call(self.module, narrow, args, kwargs)
        for name, (tensor, version) in seen.items():
            if narrow[name] is not tensor or tensor._version != version:
                wide[name].detach().copy_(narrow[name])
        return output

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Takes the present values of a model into the average.

        Args:
            model: The model.
        """
        _check_module(model, "update_parameters")
        # What was loaded with assign=True may be in half precision, where an average stands still.
        _widen(self.module)
        pairs = _pairs(self.module, model, buffers=self.use_buffers)
        first = not self.n_averaged
        for group in _groups(pairs):
            averaged = [each.detach() for each, _ in group]
            current = [true_value(new).to(old) for old, new in group]
            self._average(averaged, current, first)
        if not self.use_buffers:
            for kept, buffer in zip(self.module.buffers(), model.buffers(), strict=True):
                kept.copy_(buffer)
        self.n_averaged += 1

    def _average(self, averaged: list[Tensor], current: list[Tensor], first: bool) -> None:
        """Updates averages of one device and dtype by the function that PyTorch takes there."""
        count = self.n_averaged.to(averaged[0].device)
        if not first and self.multi_avg_fn is not None:
            self.multi_avg_fn(averaged, current, count)
        elif not first and self.avg_fn is None and averages_lists(averaged[0]):
            swa_utils.get_swa_multi_avg_fn()(averaged, current, count)
        else:
            one = self.avg_fn or swa_utils.get_swa_avg_fn()
            for old, new in zip(averaged, current, strict=True):
                old.copy_(new if first else one(old, new, count))


def _check_module(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{function} needs a torch.nn.Module, got {type(model).__name__}. Pass the model, not "
            "its class, its parameters or a state dict."
        )


def _widen(module: nn.Module) -> None:
    """Makes everything in half precision float32, tensor by tensor."""
    if any(each.dtype in HALF for each in _tensors(module)):
        convert(module, lambda each: each.float() if each.dtype in HALF else each)


def _narrow_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Returns the dtype of each tensor that the module needs in half precision to run.

    A batch norm runs, and finds better statistics, with its own tensors in float32.
    """
    batch_norms = (each for each in module.modules() if isinstance(each, _BatchNorm))
    wide = {id(tensor) for each in batch_norms for tensor in _tensors(each)}
    named = chain(module.named_parameters(), module.named_buffers())
    return {
        name: tensor.dtype
        for name, tensor in named
        if tensor.dtype in HALF and id(tensor) not in wide
    }


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers())


def _pairs(averaged: nn.Module, model: nn.Module, *, buffers: bool) -> list[Pair]:
    """Returns each tensor that is averaged, with its counterpart in the model."""
    old, new = (
        list(_tensors(each) if buffers else each.parameters()) for each in (averaged, model)
    )
    if len(old) != len(new):
        raise UsageError(
            f"update_parameters needs the model that is averaged, with {len(old)} tensors, got "
            f"{type(model).__name__} with {len(new)}. Pass the model that the average was made of."
        )
    return list(zip(old, new, strict=True))


def _groups(pairs: Iterable[Pair]) -> Iterable[Sequence[Pair]]:
    """Returns pairs by device and dtype; those that need a copy, so many that it stays small."""
    found: dict[Any, list[Pair]] = {}
    copied: Counter[Any] = Counter()
    for old, new in pairs:
        where: Any = (old.device, old.dtype)
        if where != (new.device, new.dtype):
            copied[where] += old.numel()
            where = (*where, copied[where] // _AT_ONCE)
        found.setdefault(where, []).append((old, new))
    return found.values()
