"""Float32 masters of parameters in half precision, for any optimizer."""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.errors import UsageError
from halfstep.torch._dtypes import HALF
from halfstep.torch._masters._convert import Halved, halved
from halfstep.torch._masters._feeding import OF_SCALERS, feeding_of
from halfstep.torch._masters._kept import kept_tensors
from halfstep.torch._masters._modules import follow_modules
from halfstep.torch._masters._settings import MasterSettings, checked_settings
from halfstep.torch._masters._unattached import refuse_unattached
from halfstep.torch._once import once
from halfstep.torch._regions._guard import guard
from halfstep.torch._scaling._gradients import parameters_of
from halfstep.torch._scaling._optimizers import checked_optimizer


class Masters:
    """The masters of the parameters that an optimizer trains; `keep_masters` returns them.

    Args:
        optimizer: The optimizer.
        halved: The parameters that were given masters.

    Example:
        >>> import torch
        >>> parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([parameter])
        >>> keep_masters(optimizer)
        Masters(1 tensors, 8 bytes)
    """

    def __init__(self, optimizer: Optimizer, halved: Halved) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._halved = halved
        self._removed = False

    def tensors(self) -> list[Tensor]:
        """Returns what is kept: int16 remainders, and float32 where 16 bits are too few."""
        optimizer = self._optimizer()
        return [] if optimizer is None else kept_tensors(optimizer)

    def remove(self) -> None:
        """Makes parameters, and the state of the optimizer, what they would be without masters.

        Those that were float32 are so again, exactly. Those that were in half precision lose what
        only their masters have, and their state is rounded too, as optimizers want it.
        """
        optimizer = self._optimizer()
        self._halved.undo([] if optimizer is None else [optimizer])
        if optimizer is not None and not self._removed:
            guard(optimizer).feeds(None)
        self._removed = True

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
        UsageError: It is not an optimizer, has masters already, or a setting makes no sense.

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
    refuse_fed("keep_masters", optimizer)
    parameters = once(parameters_of(optimizer))
    wide = [each for each in parameters if each.dtype is torch.float32 and each.requires_grad]
    half = [each for each in parameters if each.dtype in HALF]
    masters = Masters(optimizer, make_half(half + (wide if settings.param_dtype else []), settings))
    try:
        attach_masters(optimizer, settings)
    except UsageError:
        masters.remove()
        raise
    return masters


def make_half(parameters: Iterable[Tensor], settings: MasterSettings) -> Halved:
    """Makes parameters half-precision ones with exact masters."""
    refuse_unattached()
    follow_modules()
    return halved(parameters, settings.param_dtype or torch.bfloat16, settings.grad_dtype)


def attach_masters(optimizer: Optimizer, settings: MasterSettings) -> None:
    """Lets an optimizer see masters in the place of parameters in half precision."""
    guard(optimizer).feeds(settings.feeding())


def refuse_fed(function: str, optimizer: Optimizer) -> None:
    """Raises an error if an optimizer sees masters that somebody else keeps."""
    if feeding_of(optimizer) not in (None, OF_SCALERS):
        raise UsageError(
            f"{function} needs an optimizer without masters, got a {type(optimizer).__name__} that "
            "keep_masters or prepare has given some. Leave the second call out, or call remove() "
            "on what the first one returned."
        )
