"""Float32 masters of parameters in half precision, for any optimizer."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.torch._masters._convert import to_float32, to_half
from halfstep.torch._masters._kept import HALF, keep, kept_tensors, master_of, true_value, write
from halfstep.torch._masters._pieces import Piece
from halfstep.torch._masters._settings import MasterSettings, checked_settings
from halfstep.torch._masters._unattached import refuse_unattached
from halfstep.torch._regions._guard import guard
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._optimizers import checked_optimizer


class Masters:
    """The masters of the parameters that an optimizer trains; `keep_masters` returns them.

    Args:
        optimizer: The optimizer.
        made_half: The parameters that were float32 before.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([parameter])
        >>> keep_masters(optimizer)
        Masters(1 tensors, 8 bytes)
    """

    def __init__(self, optimizer: Optimizer, made_half: list[Tensor]) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._made_half = made_half

    def tensors(self) -> list[Tensor]:
        """Returns what is kept: int16 remainders, and float32 where 16 bits are too few."""
        optimizer = self._optimizer()
        return [] if optimizer is None else kept_tensors(optimizer)

    def remove(self) -> None:
        """Makes those parameters float32 again that were so, exactly, and forgets the masters."""
        for parameter in self._made_half:
            to_float32(parameter)
        optimizer = self._optimizer()
        if optimizer is not None:
            guard(optimizer).feeds(None)
            for parameter in parameters_of(optimizer):
                keep(parameter, None)

    def __repr__(self) -> str:
        kept = self.tensors()
        size = sum(each.numel() * each.element_size() for each in kept)
        return f"Masters({len(kept)} tensors, {size} bytes)"


def keep_masters(
    optimizer: Optimizer,
    *,
    param_dtype: str | None = None,
    grad_dtype: str | None = None,
    bucket_bytes: int | None = None,
) -> Masters:
    """Lets an optimizer train parameters in half precision as if they were in float32.

    A parameter keeps its 16 bits, and the 16 bits that a float32 number has more are kept beside
    the state of the optimizer. In a step the optimizer sees the exact float32 values, a few at a
    time, and keeps its state in float32: updates that are too small for half precision add up, and
    the result is, bit for bit, that of float32 parameters with the same gradients. The optimizer
    stays the same object; its state dict holds the masters, and loads without rounding anything.
    A step from gradients that are not finite is skipped.

    Args:
        optimizer: Any optimizer, new or in use, closures and several groups included.
        param_dtype: What parameters in float32 become, `bfloat16` or `float16`; None for leaving
            them as they are. In float16 a master takes 16 bits only if all of a tensor's
            magnitudes lie between 2^-16 and 65504, or are 0; other tensors get 32.
        grad_dtype: What gradients are kept and added up in, None for the dtype of the parameter,
            but float32 for float16. With `float32`, many small gradients add up.
        bucket_bytes: How many bytes of float32 there may be at a time during a step; a parameter
            is fed as a whole unless its update is known to go number by number. None for 256 MiB
            with optimizers of PyTorch and torchao; others may look at all of their parameters at
            once and then get all of them.

    Returns:
        What tells which tensors are kept, and undoes it.

    Raises:
        UsageError: It is not an optimizer, or a setting makes no sense.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([parameter], lr=2.0**-13)
        >>> masters = keep_masters(optimizer)
        >>> for _ in range(64):
        ...     parameter.grad = -torch.ones_like(parameter)
        ...     optimizer.step()
        >>> parameter.item() - 1.0 == 64 * 2.0**-13
        True
    """
    checked_optimizer(optimizer, "keep_masters()")
    settings = checked_settings(
        "keep_masters", param_dtype=param_dtype, grad_dtype=grad_dtype, bucket_bytes=bucket_bytes
    )
    parameters = list({id(each): each for each in parameters_of(optimizer)}.values())
    wide = [each for each in parameters if each.dtype is torch.float32 and each.requires_grad]
    made_half = wide if settings.param_dtype else []
    make_half([each for each in parameters if each.dtype in HALF] + made_half, settings)
    attach_masters(optimizer, settings)
    return Masters(optimizer, made_half)


def make_half(parameters: list[Tensor], settings: MasterSettings) -> None:
    """Makes parameters half-precision ones with exact masters."""
    for parameter in parameters:
        to_half(parameter, settings.param_dtype or torch.bfloat16, settings.grad_dtype)
    refuse_unattached()


def attach_masters(optimizer: Optimizer, settings: MasterSettings) -> None:
    """Lets an optimizer see masters in the place of parameters in half precision."""
    guard(optimizer).feeds(settings.feeding())


def float32_state_dict(model: nn.Module) -> dict[str, Any]:
    """Returns the state dict of a model with the exact float32 values of its parameters.

    Args:
        model: A model, with masters or not. Tensors in half precision come as float32.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False).bfloat16()
        >>> float32_state_dict(model)["weight"].dtype
        torch.float32
    """
    state: dict[str, Any] = model.state_dict()
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dtype in HALF:
            state[name] = true_value(own.get(name, value))
    return state


def load_float32_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
) -> Any:
    """Loads a state dict into a model, every bit of it where parameters have masters.

    `model.load_state_dict` rounds what it loads to the dtype of the parameter.

    Args:
        model: A model whose parameters have masters.
        state_dict: What `float32_state_dict` returned, or the state dict of a float32 model.
        strict: Whether the names must be those of the model.

    Returns:
        What `model.load_state_dict` returns.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> masters = keep_masters(torch.optim.SGD(model.parameters()), param_dtype="bfloat16")
        >>> load_float32_state_dict(model, {"weight": torch.tensor([[1.0 + 2.0**-20]])})
        <All keys matched successfully>
        >>> float32_state_dict(model)["weight"].item() == 1.0 + 2.0**-20
        True
    """
    result = model.load_state_dict(state_dict, strict=strict)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state_dict and master_of(parameter) is not None:
            value = state_dict[name].detach().to(parameter.device, torch.float32)
            laid_out = torch.empty_like(parameter.detach(), dtype=torch.float32).copy_(value)
            write(Piece(parameter), laid_out)
    return result
