"""How many bytes autograd keeps for backward."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter


class SavedBytes:
    """What `saved_bytes` counted so far.

    Example:
        >>> SavedBytes().bytes
        0
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: dict[int, StorageWeakRef] = {}

    def count(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor that autograd saves, the first time it is saved."""
        base = tensor if tensor._base is None else tensor._base
        if isinstance(base, Parameter) or not (tensor.is_floating_point() or tensor.is_complex()):
            return
        self.bytes += self.see(tensor)

    def see(self, tensor: Tensor) -> int:
        """Returns the bytes of a tensor's storage, 0 if it was seen before."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        # The weak reference keeps the address from being given to another storage.
        self._seen[storage._cdata] = StorageWeakRef(storage)
        return storage.nbytes()


class _Local(threading.local):
    def __init__(self) -> None:
        self.counting: tuple[SavedBytes, ...] = ()


_LOCAL = _Local()


@contextlib.contextmanager
def saved_bytes() -> Iterator[SavedBytes]:
    """Counts the bytes that autograd keeps for backward, for what runs inside the block.

    Each storage counts once. Parameters are not counted, since they exist anyway, and neither are
    integer tensors such as targets; low copies of parameters are.

    Yields:
        An object whose `bytes` is the number so far.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.ones(8))
        >>> with saved_bytes() as saved:
        ...     loss = (weight * torch.ones(8)).exp().sum()
        >>> saved.bytes
        64
    """
    saved = SavedBytes()
    # Only the innermost hooks are called, so they count for all blocks around as well.
    around = _LOCAL.counting
    _LOCAL.counting = (*around, saved)
    try:
        with saved_tensors_hooks(_pack, lambda tensor: tensor):
            yield saved
    finally:
        _LOCAL.counting = around


def leave_out(tensors: Iterable[Tensor]) -> None:
    """Does not count parameters, also not under another name that a region gives them."""
    for saved in _LOCAL.counting:
        for tensor in tensors:
            if isinstance(tensor, Parameter):
                saved.see(tensor)


def _pack(tensor: Tensor) -> Tensor:
    for saved in _LOCAL.counting:
        saved.count(tensor)
    return tensor
