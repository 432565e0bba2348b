"""Counts the bytes of tensors, whatever they share and whatever they consist of."""

from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class StorageCounter:
    """Counts the bytes of tensors, each storage once.

    Example:
        >>> counter, whole = StorageCounter(), torch.zeros(8)
        >>> counter.count([whole, {"half": whole[:4]}]), counter.count(whole)
        (32, 0)
    """

    def __init__(self) -> None:
        # The storages themselves: the address of one that is gone may be given to another.
        self._seen: dict[int, Any] = {}

    def count(self, values: Any) -> int:
        """Returns the bytes of what was not counted before.

        Args:
            values: A tensor, or dicts and lists of them, to any depth; all else counts nothing.
        """
        return sum(map(self._new, plain_tensors(values)))

    def _new(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = storage
        return storage.nbytes()


def plain_tensors(values: Any) -> Iterator[Tensor]:
    """Yields the tensors with a storage: for a subclass that wraps some, those inside of it.

    Args:
        values: A tensor, or dicts and lists of them, to any depth.

    Example:
        >>> sparse = torch.eye(2).to_sparse()
        >>> [each.dtype for each in plain_tensors({"a": [sparse, None, 1.0]})]
        [torch.int64, torch.float32]
    """
    if isinstance(values, Tensor):
        inside = _inside(values)
        yield from plain_tensors(inside) if inside else (values,)
    elif isinstance(values, Mapping):
        yield from plain_tensors(list(values.values()))
    elif isinstance(values, Iterable) and not isinstance(values, str | bytes):
        for each in values:
            yield from plain_tensors(each)


def _inside(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.is_nested and tensor.layout is torch.strided:
        return list(tensor.unbind())
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [getattr(tensor, name) for name in flatten()[0]] if flatten else []


class GradientPeak:
    """The most bytes of gradients that are alive at once, within the block.

    Args:
        parameters: Whose gradients.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> peak = GradientPeak(model.parameters())
        >>> with peak:
        ...     model(torch.ones(1, 4)).sum().backward()
        >>> peak.bytes
        160
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.bytes = 0
        self._on = False
        self._parameters = list(parameters)
        # At once: a hook that comes before this one may free the gradient.
        self._hooks = [
            each.register_post_accumulate_grad_hook(self._look) for each in self._parameters
        ]

    def __enter__(self) -> Self:
        self._on = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._on = False
        for hook in self._hooks:
            hook.remove()

    def _look(self, _parameter: Tensor) -> None:
        if self._on:
            alive = StorageCounter().count([each.grad for each in self._parameters])
            self.bytes = max(self.bytes, alive)
